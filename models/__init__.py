"""What is computed: model definitions, weights and parallel layers; knows no request."""
