"""Loggers, which write the observed values for the services and tools that display them."""

from lockstep.extensions.loggers.csv_logger import CSVLogger as CSVLogger
from lockstep.extensions.loggers.logger import Logger as Logger, recipe_of as recipe_of
from lockstep.extensions.loggers.mlflow_logger import MLflowLogger as MLflowLogger
from lockstep.extensions.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
from lockstep.extensions.loggers.wandb_logger import WandbLogger as WandbLogger
