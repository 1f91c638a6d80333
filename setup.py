"""What pyproject.toml cannot say: where README.md's links lead on an index, and that wheels have the examples."""

import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from site_pages import relink


class Project(Distribution):
    """A package whose README is written for its own repository."""

    def parse_config_files(self, *files, **options):
        """Read pyproject.toml, then make the README's links absolute."""
        super().parse_config_files(*files, **options)
        site = self.metadata.project_urls["Documentation"]
        self.metadata.long_description = relink(
            self.metadata.long_description, "README.md", lambda page: site + re.sub(r"\.md$", ".html", page)
        )


class Build(build_py):
    """`examples/` becomes `sar/examples`, from where `sar examples` copies them."""

    def run(self):
        """Copy the package and the examples; an editable installation has both in their places."""
        super().run()
        if not self.editable_mode:
            inside = Path(self.build_lib, "sar", "examples")
            shutil.copytree("examples", inside, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


setup(distclass=Project, cmdclass={"build_py": Build})
