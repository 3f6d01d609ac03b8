//! The numbers of a mixture of experts, in config.json.

use super::config_file::{ConfigError, ConfigFile, unsupported};
use super::expert_readback::ExpertLayers;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, WeightsError};
use pegainfer_kernels::ops::moe::RouteSpec;
use serde_json::Value;

/// The numbers of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// How experts are chosen.
    pub route: RouteSpec,
    /// Width of an expert; with several ranks the rank's share.
    pub width: usize,
    /// True if dummy weights send a third of the tokens to expert 0, see [`skew_gain`](Self::skew_gain).
    pub skewed: bool,
    /// Number of layers with experts.
    pub layers: usize,
}

/// `Φ⁻¹(2/3)`: a third of normally distributed numbers are larger.
const UPPER_THIRD: f64 = 0.4307;

/// Standard deviation of a dummy embedding before experts, hundreds of times what a layer of dummy weights adds to the
/// residual stream.
const DUMMY_EMBEDDING: f32 = 16.0;

impl MoeShape {
    /// Scales the dummy `embedding` of `vocab` token ids, tensor `name`, so that the experts of a token depend on its id
    /// in every layer, and tokens choose evenly. The residual streams of all tokens of a text become alike otherwise: a
    /// layer of dummy weights adds to each what is common to them. `std`: standard deviation of dummy weights.
    pub fn scale_embedding(
        loader: &mut Loader<'_>,
        (name, vocab): (&str, usize),
        std: f32,
        embedding: &mut Tensor,
    ) -> Result<(), WeightsError> {
        loader.scale_dummy(name, 0..vocab, DUMMY_EMBEDDING / std, embedding)
    }

    /// The experts whose choices are counted: not those of the last layer, which may see only sampled tokens. `last`: the
    /// last layer's number among those with experts, if it has them.
    pub fn counted(&self, last: Option<usize>) -> ExpertLayers {
        let RouteSpec { experts, .. } = self.route;
        ExpertLayers { layers: last.unwrap_or(self.layers), experts, per_token: self.route.per_token() }
    }

    /// Factor of a row of a random router with which its expert is one of the chosen for a third of the tokens.
    ///
    /// A random row gives normally distributed logits. Of these a share `p = chosen / experts` is above the lowest chosen
    /// one, `t = Φ⁻¹(1 - p)` standard deviations. The wider logits of the scaled row are above it for a third of the
    /// tokens if the factor is `t / Φ⁻¹(2/3)`. `Φ⁻¹` by Abramowitz and Stegun 26.2.22, to 0.003.
    pub(super) fn skew_gain(&self) -> f32 {
        let p = self.route.chosen as f64 / self.route.experts as f64;
        let t = (-2.0 * p.ln()).sqrt();
        let quantile = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t);
        // Of few experts each has more than a third of the tokens anyway.
        (quantile / UPPER_THIRD).max(1.0) as f32
    }
}

impl ConfigFile {
    /// The experts of a model, if it has any. `normalize`: the default of `norm_topk_prob`, which says that the weights
    /// of the chosen experts sum up to 1. `layers`: number of layers with experts. A shared expert must be as wide as the
    /// others.
    pub fn moe(&self, normalize: bool, layers: usize) -> Result<Option<MoeShape>, ConfigError> {
        // transformers 5 writes the second name.
        let names = ["num_experts", "num_local_experts"];
        let name = names.into_iter().find(|name| !self.get(name).is_null());
        let skewed = self.skews_routers(name.is_some())?;
        let Some(name) = name else { return Ok(None) };
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
        Ok(Some(MoeShape { route: RouteSpec { experts, chosen, normalize, shared }, width, skewed, layers }))
    }
}
