"""Chapter 1: a blocking engine that recomputes everything, and is the specification of all later ones."""
