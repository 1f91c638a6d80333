"""Everything that imports DGL, lazily: `import sar` stays free of it."""
