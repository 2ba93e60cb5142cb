"""What is computed of a collected step before its batches: columns, and credit for each token."""
