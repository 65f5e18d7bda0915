"""The bundled demo model: its corpus, training and export. See README.md beside this file."""
