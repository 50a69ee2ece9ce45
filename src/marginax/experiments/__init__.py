"""The paper's tabular experiments, a module a figure, behind `marginax reproduce`."""
