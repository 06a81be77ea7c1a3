"""The facts that rooms tell one another: frozen records, no behaviour, no tensors."""
