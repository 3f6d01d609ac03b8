//! The models whose ops are checked, and the steps that contain them.

#[cfg(feature = "deepseek-v4")]
mod deepseek_v4;
pub mod groups;
mod model;
mod shapes;
pub mod steps;

pub use model::{Model, StepShape};

use anyhow::{Result, bail};
use pegainfer_models::detect;
use pegainfer_qwen3_4b::{Qwen3, config::Config as Qwen3Config};
#[cfg(feature = "qwen35")]
use pegainfer_qwen35_4b::Qwen35;
use pegainfer_runtime::Model as _;
use shapes::{LAYERS, qwen3_4b, qwen3_30b_a3b};
#[cfg(feature = "qwen35")]
use shapes::{qwen35_4b, qwen35_35b_a3b, qwen35_with_tower};
use std::path::Path;

/// Most tokens of a step of a whole model with group-quantised weights: more widen them for the GEMMs of bf16, which a
/// small model checks with each format.
const PACKED_TOKENS: usize = 160;

/// Common shapes, each with as many layers as have ops of different shapes.
pub fn typical() -> impl Iterator<Item = (&'static str, Model)> {
    let models = [
        ("a model of Qwen3-4B's shape", Model::qwen3(qwen3_4b(), 1, false)),
        ("a model of Qwen3-4B's shape with FP8 weights", Model::qwen3(qwen3_4b(), 1, true)),
        ("a model of Qwen3-4B's shape with group-quantised weights", Model::qwen3_groups(qwen3_4b(), PACKED_TOKENS)),
        ("one of two ranks of Qwen3-4B", Model::qwen3(qwen3_4b(), 2, false)),
        #[cfg(feature = "qwen35")]
        ("a model of Qwen3.5-4B's shape", Model::qwen35(qwen35_4b(), 1, false)),
        #[cfg(feature = "qwen35")]
        ("a model of Qwen3.5-4B's shape with FP8 weights", Model::qwen35(qwen35_4b(), 1, true)),
        #[cfg(feature = "qwen35")]
        ("one of two ranks of Qwen3.5-4B", Model::qwen35(qwen35_4b(), 2, false)),
        #[cfg(feature = "qwen35")]
        ("Qwen3.5-0.8B's vision tower", Model::qwen35_tower(qwen35_with_tower([768, 12, 3072], 1024))),
        #[cfg(feature = "qwen35")]
        ("Qwen3.5-4B's vision tower", Model::qwen35_tower(qwen35_with_tower([1024, 16, 4096], 2560))),
        #[cfg(feature = "qwen35")]
        ("Qwen3.5-27B's vision tower", Model::qwen35_tower(qwen35_with_tower([1152, 16, 4304], 5120))),
        ("a model of Qwen3-30B-A3B's shape", Model::qwen3(qwen3_30b_a3b(), 1, false)),
        ("a model of Qwen3-30B-A3B's shape with FP8 weights", Model::qwen3(qwen3_30b_a3b(), 1, true)),
        #[cfg(feature = "qwen35")]
        ("a model of Qwen3.5-35B-A3B's shape", Model::qwen35(qwen35_35b_a3b(), 1, false)),
        #[cfg(feature = "qwen35")]
        ("a model of Qwen3.5-35B-A3B's shape with FP8 weights", Model::qwen35(qwen35_35b_a3b(), 1, true)),
        #[cfg(feature = "deepseek-v4")]
        ("a model of DeepSeek-V4-Flash's shape", Model::deepseek_v4(deepseek_v4::flash())),
    ];
    models.into_iter()
}

/// A tower with heads of 64 and GEMMs of 512 columns, which have the kernels of large towers.
#[cfg(all(test, feature = "qwen35"))]
pub fn small_tower() -> Model {
    Model::qwen35_tower(qwen35_with_tower([512, 8, 512], 256))
}

impl Model {
    /// The model of the checkpoint in `dir`. Models that may have FP8 weights come twice, with a suffix for the name.
    pub fn load(dir: &Path) -> Result<Vec<(&'static str, Self)>> {
        let both = |model: &dyn Fn(bool) -> Self| vec![("", model(false)), (" with FP8 weights", model(true))];
        match detect::detect(dir)?.name {
            Qwen3::NAME => {
                let config = Qwen3::load_config(dir)?;
                let config = Qwen3Config { layers: config.layers.min(LAYERS), ..config };
                let mut models = both(&|fp8| Self::qwen3(config.clone(), 1, fp8));
                // Experts in groups run on a CPU only.
                if config.moe.is_none() {
                    models.push((" with group-quantised weights", Self::qwen3_groups(config, usize::MAX)));
                }
                Ok(models)
            }
            #[cfg(feature = "qwen35")]
            Qwen35::NAME => {
                let config = Qwen35::load_config(dir)?;
                Ok(both(&|fp8| Self::qwen35(config.clone(), 1, fp8)))
            }
            #[cfg(feature = "deepseek-v4")]
            name if name == pegainfer_models::engine::deepseek_v4::FAMILY.name => {
                let config = pegainfer_deepseek_v4::config::Config::load(dir)?;
                Ok(vec![("", Self::deepseek_v4(config))])
            }
            name => bail!("{name} has no CUDA kernels yet: there is nothing to check"),
        }
    }
}
