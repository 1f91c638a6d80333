"""Every code block of README and docs, executed; the pages built and looked at."""
