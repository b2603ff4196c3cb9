"""LightningCLI: the strategy, its settings and callbacks from a YAML file: ``python cli.py fit --config cli.yaml``."""

from _model import Classifier, report, train_loader
from lightning.pytorch.cli import LightningCLI


class Data(Classifier):
    """The module with its own data, so that the file has nothing to say about data."""

    def train_dataloader(self):
        return train_loader()


if __name__ == "__main__":
    report(LightningCLI(Data, save_config_callback=None).trainer)
