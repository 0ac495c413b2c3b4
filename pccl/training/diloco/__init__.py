"""DiLoCo: many local steps, then one average."""
