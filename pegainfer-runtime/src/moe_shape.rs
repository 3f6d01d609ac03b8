//! The numbers of a mixture of experts, in config.json.

use super::config_file::{ConfigError, ConfigFile, unsupported};
use pegainfer_kernels::ops::moe::RouteSpec;
use serde_json::Value;

/// The numbers of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// How experts are chosen.
    pub route: RouteSpec,
    /// Width of an expert; with several ranks the rank's share.
    pub width: usize,
}

impl ConfigFile {
    /// The experts of a model, if it has any. `normalize`: the default of `norm_topk_prob`, which says that the weights
    /// of the chosen experts sum up to 1. A shared expert must be as wide as the others.
    pub fn moe(&self, normalize: bool) -> Result<Option<MoeShape>, ConfigError> {
        // transformers 5 writes the second name.
        let names = ["num_experts", "num_local_experts"];
        let Some(name) = names.into_iter().find(|name| !self.get(name).is_null()) else { return Ok(None) };
        let (experts, chosen) = (self.size(name)?, self.size("num_experts_per_tok")?);
        if chosen > experts {
            return Err(self.invalid(format!("num_experts_per_tok is {chosen}, but {name} is {experts}")));
        }
        let width = self.size("moe_intermediate_size")?;
        let shared = match self.get("shared_expert_intermediate_size") {
            Value::Null => false,
            value if value.as_u64() == Some(width as u64) => true,
            value => {
                let served = "a shared expert as wide as moe_intermediate_size";
                return Err(unsupported("shared_expert_intermediate_size", value, served));
            }
        };
        let normalize = if self.get("norm_topk_prob").is_null() { normalize } else { self.flag("norm_topk_prob")? };
        Ok(Some(MoeShape { route: RouteSpec { experts, chosen, normalize, shared }, width }))
    }
}
