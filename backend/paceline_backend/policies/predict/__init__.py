"""Predictors, which fit a performance model of each worker to feedback.

    linear      `LinearPredictor`: T = a·Λ' + c·n + b, most presets; `PerSamplePredictor`: CHRONICA
    regression  the fit of `LinearPredictor`, as compiled code
    gru         `GruPredictor`: the next step's time from the last ones (EP4DDL); needs torch
    estimators  regressors of scikit-learn, or of a third party, by `fit` and `predict`
    least_squares  `non_negative`: coefficients that are 0 or more

Presets make the predictors, and `policies.plan` calls ``fit`` for each segment:

    models = LinearPredictor(window=64, cost="auto").fit(feedback, world)
    models.ett(features)  # expected seconds of each worker's batch
"""
