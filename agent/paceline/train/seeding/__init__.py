"""Random numbers that belong to a sample, whichever rank and process loads it.

`session.loader()` sets the current epoch in each process that loads samples: its own process, and
the DataLoader's workers. Data sets call these functions, since they have neither session nor
epoch::

    def __getitem__(self, index):
        noise = torch.randn(WIDTH, generator=paceline.generator(index))
        return self.inputs[index] + noise, self.labels[index]
"""
