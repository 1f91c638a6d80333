"""The part of Kubernetes' published schemas that the manifests of examples/cluster use: each field and its type.

TrainJob: Kubeflow Trainer 2.2, `trainer.kubeflow.org/v1alpha1`. RayJob: KubeRay, `ray.io/v1`. A dictionary has these
fields and no others, those of its `REQUIRED` at least; a list of one thing has any number of them; `{str: X}` any keys.
"""

from typing import Any

REQUIRED = "required"

QUANTITIES = {str: str}
RESOURCES = {"requests": QUANTITIES, "limits": QUANTITIES}
VARIABLES = [{"name": str, "value": str, REQUIRED: ("name",)}]
MOUNTS = [{"name": str, "mountPath": str, "readOnly": bool, REQUIRED: ("name", "mountPath")}]
CLAIM = {"claimName": str, "readOnly": bool, REQUIRED: ("claimName",)}
VOLUMES = [{"name": str, "persistentVolumeClaim": CLAIM, REQUIRED: ("name",)}]
METADATA = {"name": str, "namespace": str, "labels": {str: str}, "annotations": {str: str}, REQUIRED: ("name",)}

CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": VARIABLES,
    "resources": RESOURCES,
    "volumeMounts": MOUNTS,
    REQUIRED: ("name",),
}
POD = {"containers": [CONTAINER], "volumes": VOLUMES, REQUIRED: ("containers",)}
POD_TEMPLATE = {"spec": POD}

PATCHED_CONTAINER = {"name": str, "env": VARIABLES, "volumeMounts": MOUNTS, REQUIRED: ("name",)}
PATCHED_POD = {"containers": [PATCHED_CONTAINER], "volumes": VOLUMES, "nodeSelector": {str: str}}
PATCHED_JOB = {"name": str, "template": {"spec": {"template": {"spec": PATCHED_POD}}}, REQUIRED: ("name",)}
PATCH = {
    "manager": str,
    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [PATCHED_JOB]}}},
    REQUIRED: ("manager",),
}

TRAIN_JOB = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": METADATA,
    "spec": {
        "runtimeRef": {"name": str, "apiGroup": str, "kind": str, REQUIRED: ("name",)},
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "env": VARIABLES,
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": RESOURCES,
        },
        "runtimePatches": [PATCH],
        "activeDeadlineSeconds": int,
        "suspend": bool,
        REQUIRED: ("runtimeRef",),
    },
    REQUIRED: ("apiVersion", "kind", "metadata", "spec"),
}

RAY_HEAD = {"rayStartParams": {str: str}, "template": POD_TEMPLATE, REQUIRED: ("rayStartParams", "template")}
RAY_WORKERS = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "numOfHosts": int,
    "rayStartParams": {str: str},
    "template": POD_TEMPLATE,
    REQUIRED: ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
}
RAY_JOB = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": METADATA,
    "spec": {
        "entrypoint": str,
        "rayClusterSpec": {
            "rayVersion": str,
            "headGroupSpec": RAY_HEAD,
            "workerGroupSpecs": [RAY_WORKERS],
            REQUIRED: ("headGroupSpec",),
        },
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "submissionMode": str,
        "runtimeEnvYAML": str,
    },
    REQUIRED: ("apiVersion", "kind", "metadata", "spec"),
}


def faults(value: Any, expected: Any, where: str = "") -> list[str]:
    """What is not as a schema has it, with the path to it."""
    if isinstance(expected, type):
        return [] if type(value) is expected else [f"{where} is {value!r}, expected {expected.__name__}"]
    if isinstance(expected, str):
        return [] if value == expected else [f"{where} is {value!r}, expected {expected!r}"]
    if isinstance(expected, list):
        if type(value) is not list:
            return [f"{where} is {value!r}, expected a list"]
        return [fault for n, item in enumerate(value) for fault in faults(item, expected[0], f"{where}[{n}]")]
    if type(value) is not dict:
        return [f"{where} is {value!r}, expected fields"]
    found = [f"{where}.{name} is missing" for name in expected.get(REQUIRED, ()) if name not in value]
    for name, item in value.items():
        of_name = expected.get(str, expected.get(name)) if name != REQUIRED else None
        found += [f"{where}.{name} is no field"] if of_name is None else faults(item, of_name, f"{where}.{name}")
    return found
