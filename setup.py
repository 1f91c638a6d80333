"""What pyproject.toml cannot say: on a package index, README.md's links lead to the documentation's site."""

import re

from setuptools import Distribution, setup


class Project(Distribution):
    """A package whose README is written for its own repository."""

    def parse_config_files(self, *files, **options):
        """Read pyproject.toml, then make the README's links absolute.

        The site has the page `docs/NAME.md` at `NAME/`, and what else there is where the repository has it.
        """
        super().parse_config_files(*files, **options)
        site = self.metadata.project_urls["Documentation"]
        text = re.sub(r"\]\((?![a-z]+:|#)(?:docs/)?", f"]({site}", self.metadata.long_description)
        self.metadata.long_description = re.sub(rf"(\]\({site}[\w/-]+)\.md\b", r"\1/", text)


setup(distclass=Project)
