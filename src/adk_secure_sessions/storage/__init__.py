"""Read and write the encrypted tables; `features/` has the modules of optional features."""
