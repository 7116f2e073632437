"""Predictors, which fit a performance model of each worker to feedback.

    linear         `LinearPredictor`: T = a·Λ' + c·n + b (see `Models`), for most presets;
                   `PerSamplePredictor`: the model of the CHRONICA paper
    regression     the fit of `LinearPredictor`, as compiled code
    early          probabilities of costs of a batch, while few steps are known
    gru            `GruPredictor`: the next step's time from the last ones (EP4DDL); needs torch
    estimators     predictors from scikit-learn's regressors, or from a third party's
    least_squares  `non_negative`: least squares with coefficients that are 0 or more

Presets make the predictors, and `policies.plan` calls ``fit`` for each segment:

    models = LinearPredictor(window=64, cost="auto").fit(feedback, world)
    models.ett(features)  # expected seconds of each worker's batch
"""
