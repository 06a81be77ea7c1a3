"""Messages and records that the packages exchange: frozen, without behaviour, without tensors."""
