"""Training under the launchers and trainers that people have: Ray, PyTorch Lightning, Slurm, MPI, Kubernetes.

Each test has a time limit, and is skipped where what it is about is not installed; CONTRIBUTING.md says how to get it.
"""
