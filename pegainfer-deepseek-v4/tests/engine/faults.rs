//! Faults of one of two ranks.

#[path = "../../../pegainfer-runtime/tests/family/rank_faults.rs"]
mod rank_faults;

use crate::support::options;
use half::bf16;
use pegainfer_core::tensor::DType;
use pegainfer_deepseek_v4::DeepSeekV4 as Family;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::weights::Router;
use rank_faults::{Faults, double};
use std::time::Duration;

const FAULTS: Faults<Family> = Faults {
    refused: (
        |exec, weights| {
            let narrow = exec.tensor("narrow", &[1, 1], DType::U32).unwrap();
            weights.layers[1].moe.router = Router::Hash(narrow);
        },
        "route: rank 1: narrow ",
    ),
    shorter: |weights| weights.layers.truncate(4),
    different: (
        |exec, weights| double(exec, &mut weights.layers[2].attn.kv_norm, |value: bf16| value + value),
        "the state of layer 2",
    ),
    // In each of five layers.
    slow: ("route", Duration::from_millis(50)),
    options: || options(Numerics::REFERENCE),
};
