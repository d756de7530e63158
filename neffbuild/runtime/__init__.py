"""The serving side: loader, dispatcher, block-table trim, torch.compile backend."""
