"""Random numbers that belong to a sample, whichever rank and process loads it.

`session.loader()` says to each process that loads which epoch it loads: its own process, and the
DataLoader's workers. Data sets ask here, as they know neither session nor epoch::

    def __getitem__(self, index):
        noise = torch.randn(WIDTH, generator=paceline.generator(index))
        return self.inputs[index] + noise, self.labels[index]
"""
