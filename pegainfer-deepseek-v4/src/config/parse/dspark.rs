//! The fields of config.json for DSpark.

use super::Raw;
use crate::config::DSpark;
use pegainfer_core::schedule::speculation::MAX_DRAFT_TOKENS;
use pegainfer_runtime::{BlockShape, ConfigError, ConfigFile};

impl Raw {
    /// The numbers of DSpark, with blocks of `tokens` positions. The ratios of its stages follow those of the layers.
    pub(super) fn dspark(&self, tokens: usize, file: &ConfigFile) -> Result<DSpark, ConfigError> {
        let stages = self.compress_ratios.get(self.num_hidden_layers..).unwrap_or_default();
        let noise_token = self.dspark_noise_token_id.unwrap_or(u32::MAX);
        let targets = &self.dspark_target_layer_ids;
        for (wrong, message) in [
            (
                !(1..=MAX_DRAFT_TOKENS).contains(&tokens),
                format!("dspark_block_size is {tokens}; it must be 1 to {MAX_DRAFT_TOKENS}"),
            ),
            (
                noise_token as usize >= self.vocab_size,
                "dspark_noise_token_id is missing or not in the vocabulary".to_owned(),
            ),
            (
                targets.is_empty() || targets.iter().any(|layer| *layer >= self.num_hidden_layers),
                format!("dspark_target_layer_ids is {targets:?}; it must have numbers of layers"),
            ),
            (
                self.dspark_markov_rank == 0 || !self.dspark_markov_rank.is_multiple_of(32),
                format!("dspark_markov_rank is {}; it must be a multiple of 32", self.dspark_markov_rank),
            ),
            (
                stages.is_empty() || stages.iter().any(|ratio| *ratio != 0),
                "compress_ratios must have a 0 for each stage of DSpark, after those of the layers".to_owned(),
            ),
        ] {
            if wrong {
                return Err(file.invalid(message));
            }
        }
        Ok(DSpark {
            layers: stages.len(),
            targets: targets.clone(),
            markov_rank: self.dspark_markov_rank,
            block: BlockShape { tokens, noise_token },
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::testing::flash_json;
    use serde_json::{Value, json};

    #[test]
    fn numbers_of_dspark_that_cannot_be_are_named() {
        for (field, value) in [
            ("dspark_block_size", json!(33)),
            ("dspark_noise_token_id", json!(129_280)),
            ("dspark_noise_token_id", Value::Null),
            ("dspark_target_layer_ids", json!([40, 43])),
            ("dspark_target_layer_ids", json!([])),
            ("dspark_markov_rank", json!(100)),
        ] {
            let mut config = flash_json(true);
            config[field] = value;
            let error = Config::parse(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        let mut config = flash_json(true);
        config["compress_ratios"].as_array_mut().unwrap().push(json!(4));
        assert!(Config::parse(&config.to_string()).unwrap_err().to_string().contains("a 0 for each stage"));
    }
}
