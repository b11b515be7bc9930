"""Programs that build and check a release: `make dist`, `make sbom` and `make release-check`."""
