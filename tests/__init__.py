"""The test suite of sar; a package, so that worker processes can import a case by its module's name."""
