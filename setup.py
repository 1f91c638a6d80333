"""What pyproject.toml cannot say: where README.md's links lead on an index."""

import re
import sys
from pathlib import Path

from setuptools import Distribution, setup

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


setup(distclass=Project)
