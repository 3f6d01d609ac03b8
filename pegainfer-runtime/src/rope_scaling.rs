//! Rotary embeddings as config.json describes them: plain, or YaRN for a longer context.

use super::config_file::{ConfigError, ConfigFile, unsupported};
use super::sizes::MAX_CONTEXT;
use pegainfer_kernels::ops::{RopeSpec, Yarn};
use serde_json::Value;

/// Supported values, for refusals.
const SERVED: &str = "plain RoPE, and rope_type yarn";

impl ConfigFile {
    /// Rotary frequencies from `rope_theta` and `rope_scaling` of older files or `rope_parameters` of newer ones.
    /// `--rope-scaling` overrides both.
    pub fn rope(&self) -> Result<RopeSpec, ConfigError> {
        let scaling = self.rope_scaling()?;
        let theta = self.first_of(["rope_parameters.rope_theta", "rope_theta"])?;
        let Some(scaling) = scaling else { return Ok(RopeSpec::from(theta)) };
        let number = |name: &str| match scaling.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64().filter(|number| *number > 0.0) {
                Some(number) => Ok(Some(number)),
                None => Err(self.invalid(format!("{name} of rope_scaling is {value}, and must be a positive number"))),
            },
        };
        let factor = number("factor")?.ok_or_else(|| self.invalid("rope_scaling has no factor"))?;
        if factor < 1.0 {
            return Err(self.invalid(format!("factor of rope_scaling is {factor}, and must be at least 1")));
        }
        let original_context = match number("original_max_position_embeddings")? {
            Some(length) => length,
            None => self.positive("max_position_embeddings")?,
        };
        let mscale = |mscale: f64| 0.1 * mscale * factor.ln() + 1.0;
        let attention_factor = match (number("attention_factor")?, number("mscale")?, number("mscale_all_dim")?) {
            (Some(attention_factor), _, _) => attention_factor,
            (None, Some(one), Some(all)) => mscale(one) / mscale(all),
            _ => mscale(1.0),
        };
        let yarn = Yarn {
            factor,
            beta_fast: number("beta_fast")?.unwrap_or(32.0),
            beta_slow: number("beta_slow")?.unwrap_or(1.0),
            original_context,
            truncate: scaling.get("truncate").and_then(Value::as_bool).unwrap_or(true),
        };
        let theta = number("rope_theta")?.unwrap_or(theta);
        Ok(RopeSpec { theta, yarn: Some(yarn), attention_factor })
    }

    /// Context length of the model: `max_position_embeddings`, or the extended length with YaRN.
    pub fn context(&self, rope: &RopeSpec) -> Result<usize, ConfigError> {
        let length = self.size("max_position_embeddings")?;
        let extended = rope.yarn.map_or(0, |yarn| (yarn.original_context * yarn.factor) as usize);
        if extended > MAX_CONTEXT {
            return Err(self.invalid(format!(
                "rope_scaling extends the context to {extended} tokens, and at most {MAX_CONTEXT} are served"
            )));
        }
        Ok(length.max(extended))
    }

    /// The object that describes YaRN; `None` for plain RoPE. Refuses other kinds.
    fn rope_scaling(&self) -> Result<Option<&Value>, ConfigError> {
        let flag = self.rope_scaling_flag().map(|value| ("--rope-scaling", value));
        let fields = ["rope_scaling", "rope_parameters"].map(|field| (field, self.get(field)));
        for (field, rope) in flag.into_iter().chain(fields) {
            let kind = rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str).unwrap_or("default");
            match kind {
                "default" if field == "--rope-scaling" => return Ok(None),
                "default" => {}
                "yarn" => return Ok(Some(rope)),
                _ => return Err(unsupported(field, rope, SERVED)),
            }
        }
        Ok(None)
    }

    /// The first of these fields that exists, a positive number; the last one is required.
    fn first_of(&self, fields: [&str; 2]) -> Result<f64, ConfigError> {
        self.positive(if self.get(fields[0]).is_null() { fields[1] } else { fields[0] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Overrides;
    use serde_json::json;

    fn file(config: &Value) -> ConfigFile {
        ConfigFile::parse(&config.to_string(), "Test").unwrap()
    }

    #[test]
    fn frequencies_are_those_of_transformers() {
        let fixture: Value = serde_json::from_str(include_str!("yarn.json")).unwrap();
        for case in fixture["cases"].as_array().unwrap() {
            let theta = &case["rope_scaling"]["rope_theta"];
            let config = json!({"rope_theta": theta, "rope_scaling": case["rope_scaling"]});
            let rope = file(&config).rope().unwrap();
            let expected = case["attention_factor"].as_f64().unwrap();
            assert!((rope.attention_factor - expected).abs() < 1e-12, "{case}");
            let frequencies = rope.frequencies(case["dim"].as_u64().unwrap() as usize);
            let expected: Vec<f64> = case["inv_freq"].as_array().unwrap().iter().map(|f| f.as_f64().unwrap()).collect();
            assert_eq!(frequencies.len(), expected.len());
            for (i, (got, expected)) in frequencies.iter().zip(expected).enumerate() {
                // transformers computes in f32.
                assert!((got / expected - 1.0).abs() < 3e-6, "pair {i}: {got} is not {expected}");
            }
        }
    }

    #[test]
    fn the_flag_comes_before_the_file_and_extends_the_context() {
        let qwen3 = json!({"rope_theta": 1e6, "max_position_embeddings": 40_960, "rope_scaling": null});
        let plain = file(&qwen3).rope().unwrap();
        assert_eq!((plain, file(&qwen3).context(&plain).unwrap()), (RopeSpec::from(1e6), 40_960));
        let flag = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768});
        let with = |config: &Value, flag: &Value| {
            file(config).with(Overrides { rope_scaling: Some(flag.clone()), ..Overrides::default() })
        };
        let extended = with(&qwen3, &flag);
        let rope = extended.rope().unwrap();
        assert_eq!(extended.context(&rope).unwrap(), 131_072);
        assert!((rope.attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
        let newer = json!({"max_position_embeddings": 262_144, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7,
            "factor": 4.0, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}});
        let rope = file(&newer).rope().unwrap();
        assert_eq!((rope.theta, file(&newer).context(&rope).unwrap()), (1e7, 1_048_576));
        assert_eq!(with(&newer, &json!({"rope_type": "default"})).rope().unwrap(), RopeSpec::from(1e7));
    }

    #[test]
    fn other_kinds_and_impossible_numbers_are_refused_by_name() {
        let refused = |scaling: Value, words: &str| {
            let config = json!({"rope_theta": 1e6, "max_position_embeddings": 4096, "rope_scaling": scaling});
            let error = file(&config).rope().unwrap_err().to_string();
            assert!(error.contains("rope_scaling") && error.contains(words), "{error}");
        };
        for kind in ["linear", "dynamic", "longrope", "llama3"] {
            refused(json!({"rope_type": kind, "factor": 2.0}), kind);
            refused(json!({"type": kind, "factor": 2.0}), "serves plain RoPE, and rope_type yarn");
        }
        refused(json!({"rope_type": "yarn"}), "no factor");
        refused(json!({"rope_type": "yarn", "factor": "4"}), "factor");
        refused(json!({"rope_type": "yarn", "factor": 0.5}), "at least 1");
        refused(json!({"rope_type": "yarn", "factor": 2, "beta_fast": -1}), "beta_fast");
        let endless = json!({"rope_theta": 1e6, "max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 1e300}});
        let error = file(&endless).context(&file(&endless).rope().unwrap()).unwrap_err().to_string();
        assert!(error.contains("rope_scaling extends the context"), "{error}");
    }
}
