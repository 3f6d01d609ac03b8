//! Faults of one of two ranks.

#[path = "../../../pegainfer-runtime/tests/family/rank_faults.rs"]
mod rank_faults;

use crate::support::{Family, options};
use pegainfer_core::tensor::DType;
use rank_faults::{Faults, double};
use std::time::Duration;

const FAULTS: Faults<Family> = Faults {
    refused: (
        |exec, weights| weights.decoder.layers[1].input_norm = exec.tensor("narrow", &[1], DType::F32).unwrap(),
        "reduce_add_norm: rank 1: ",
    ),
    shorter: |weights| weights.decoder.layers.truncate(7),
    different: (
        |exec, weights| double(exec, &mut weights.decoder.norm, |value: f32| value + value),
        "the output of the last layer",
    ),
    slow: ("embedding", Duration::from_millis(250)),
    options,
};
