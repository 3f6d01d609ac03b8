//! FP8 weights of a dense model: their description in config.json, and loading of projections.

use super::config_file::{ConfigError, ConfigFile, text, unsupported};
use pegainfer_core::weights::{Columns, Loader, SourceTensor, WeightsError};
use pegainfer_kernels::cpu::weights::BLOCK;
use pegainfer_kernels::ops::{self, BlockScales, Matrix};
use serde_json::{Map, Value, json};

/// Supported values, for refusals.
const SERVED: &str =
    "quant_method fp8 with e4m3 weights, blocks of 128 x 128 and dynamic activations, and bf16 weights";

/// A model with FP8 weights: `quantization_config`, or the wish to round bf16 weights when they are loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantization {
    /// Modules whose weights stay bf16: whole names, or beginnings or ends of names at a dot.
    kept: Vec<String>,
    /// bf16 weights of the checkpoint are rounded to FP8.
    at_load: bool,
}

impl ConfigFile {
    /// The FP8 weights requested by `quantization_config` or by the user; `None` for bf16 weights. `never`: modules
    /// that the family's FP8 checkpoints keep in bf16.
    pub fn quantization(&self, never: &[&str]) -> Result<Option<Quantization>, ConfigError> {
        let mut kept: Vec<String> = never.iter().map(|name| (*name).to_owned()).collect();
        let config = self.get("quantization_config");
        if config.is_null() || config.as_object().is_some_and(Map::is_empty) {
            return Ok(self.quantize_at_load().then_some(Quantization { kept, at_load: true }));
        }
        let method = config.get("quant_method").or(config.get("quant_algo")).unwrap_or(config);
        if method != "fp8" {
            return Err(unsupported("quantization_config.quant_method", text(method), SERVED));
        }
        for (field, served) in [
            ("quantization_config.activation_scheme", json!("dynamic")),
            ("quantization_config.fmt", json!("e4m3")),
            ("quantization_config.weight_block_size", json!([BLOCK, BLOCK])),
        ] {
            let value = self.get(field);
            let missing = value.is_null() && field != "quantization_config.weight_block_size";
            if *value != served && !missing {
                return Err(unsupported(field, text(value), SERVED));
            }
        }
        match config.get("modules_to_not_convert") {
            None | Some(Value::Null) => {}
            Some(Value::Array(names)) if names.iter().all(Value::is_string) => {
                kept.extend(names.iter().filter_map(Value::as_str).map(str::to_owned));
            }
            Some(other) => {
                return Err(self.invalid(format!("quantization_config.modules_to_not_convert is {other}")));
            }
        }
        Ok(Some(Quantization { kept, at_load: self.quantize_at_load() }))
    }
}

impl Quantization {
    /// All projections except those of modules with these names.
    pub fn every(never: &[&str]) -> Self {
        Self { kept: never.iter().map(|name| (*name).to_owned()).collect(), at_load: true }
    }

    /// True if bf16 weights are rounded at load.
    pub fn at_load(&self) -> bool {
        self.at_load
    }

    /// True if the projection weight `name` (`X.weight`) is FP8 according to config.json.
    fn converts(&self, name: &str) -> bool {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        !self.kept.iter().any(|kept| {
            let (front, back) = (module.strip_prefix(kept.as_str()), module.strip_suffix(kept.as_str()));
            front.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                || back.is_some_and(|rest| rest.ends_with('.'))
        })
    }
}

/// Loads the given columns of projection weights, stacked along their rows in the given order. Weights stored as FP8
/// stay FP8; with dummy weights or rounding at load, [`Quantization`] decides.
pub fn load_projection(
    loader: &mut Loader<'_>,
    quantization: Option<&Quantization>,
    title: &str,
    parts: &[SourceTensor],
    columns: impl Into<Columns>,
) -> Result<Matrix, WeightsError> {
    let fp8 = |part: &SourceTensor| {
        !part.is_zeros()
            && match (loader.is_fp8(&part.name), quantization) {
                (Some(true), _) => true,
                (Some(false), Some(quantization)) => quantization.at_load && quantization.converts(&part.name),
                (None, Some(quantization)) => quantization.converts(&part.name),
                (_, None) => false,
            }
    };
    let columns = columns.into();
    let formats: Vec<bool> = parts.iter().map(fp8).collect();
    let mut matrices = Vec::new();
    let mut first = 0;
    while first < parts.len() {
        let mut end = first + 1;
        // Blocks extend into the next part only if they end with this one.
        let extends = |end: usize| !formats[first] || parts[end - 1].part.len().is_multiple_of(BLOCK);
        while end < parts.len() && formats[end] == formats[first] && extends(end) {
            end += 1;
        }
        let whole = end - first == parts.len();
        let title = if whole { title } else { &parts[first].name };
        let parts = &parts[first..end];
        matrices.push(if formats[first] {
            let (weight, scale) = loader.fp8(title, parts, columns.clone(), ops::quantize_fp8)?;
            Matrix::Fp8 { weight, scale: BlockScales::F32(scale) }
        } else {
            Matrix::Bf16(loader.stacked(title, parts, columns.clone())?)
        });
        first = end;
    }
    Ok(if matrices.len() == 1 { matrices.remove(0) } else { Matrix::Stacked(matrices) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::exec::Exec;
    use pegainfer_core::isa::Isa;
    use pegainfer_core::weights::Source;

    fn parse(config: &Value) -> Result<Option<Quantization>, String> {
        let text = json!({ "quantization_config": config }).to_string();
        ConfigFile::parse(&text, "Test").unwrap().quantization(&["in_proj_a"]).map_err(|e| e.to_string())
    }

    fn official() -> Value {
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]})
    }

    #[test]
    fn modules_that_are_not_converted_stay_bf16() {
        assert_eq!(parse(&Value::Null).unwrap(), None);
        assert_eq!(parse(&json!({})).unwrap(), None, "some exports leave an empty object");
        let quantization = parse(&official()).unwrap().unwrap();
        for (name, fp8) in [
            ("model.layers.0.mlp.gate_proj.weight", true),
            ("model.layers.1.mlp.gate_proj.weight", false),
            ("model.layers.11.mlp.gate_proj.weight", true),
            ("lm_head.weight", false),
            ("model.layers.0.linear_attn.in_proj_a.weight", false),
            ("model.layers.0.linear_attn.in_proj_qkv.weight", true),
        ] {
            assert_eq!(quantization.converts(name), fp8, "{name}");
        }
    }

    #[test]
    fn rows_in_several_formats_are_stacked() {
        let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
        let source = Source::Dummy { seed: 1, std: 0.02, uniform: pegainfer_kernels::ops::uniform };
        let quantization = parse(&official()).unwrap().unwrap();
        let rows = [("a", 128), ("b", 200), ("c", 60), ("in_proj_a", 5), ("lm_head", 7), ("d", 3)];
        let parts = rows.map(|(name, rows)| SourceTensor::whole(format!("x.{name}.weight"), rows));
        let mut load = |quantization: Option<&Quantization>| {
            let mut bytes = 0;
            let load = |loader: &mut Loader<'_>| load_projection(loader, quantization, "x", &parts, 150);
            let matrix = Loader::run(&mut exec, &source, &mut |n| bytes += n, load).unwrap();
            assert_eq!(bytes, matrix.as_ref().bytes());
            (matrix, bytes)
        };
        let ((plain, plain_bytes), (mixed, mixed_bytes)) = (load(None), load(Some(&quantization)));
        // 12 of the 403 rows stay bf16. Scales are for blocks of 128 columns, and of 128, 200, 60 and 3 rows.
        assert_eq!((plain_bytes, mixed_bytes), (2 * 403 * 150, 391 * 150 + 4 * 2 * (3 + 1 + 1) + 2 * 12 * 150));
        let Matrix::Stacked(matrices) = &mixed else { panic!("{mixed:?}") };
        let shapes: Vec<_> = matrices.iter().map(|part| (part.is_quantized(), part.shape().0)).collect();
        // Blocks of b continue where those of a end, but c cannot continue inside b's last block.
        assert_eq!(shapes, [(true, 328), (true, 60), (false, 12), (true, 3)]);
        assert_eq!((plain.shape(), mixed.shape()), ((403, 150), (403, 150)));
        for (i, (plain, mixed)) in plain.dequantize().iter().zip(mixed.dequantize()).enumerate() {
            let exact = (388 * 150..400 * 150).contains(&i);
            let bound = if exact { 0.0 } else { (plain.abs() / 16.0).max(1e-6) * 1.001 };
            assert!((plain - mixed).abs() <= bound, "{i}: {mixed} of {plain}");
        }
    }

    #[test]
    fn other_schemes_are_refused_by_name() {
        for (field, value) in [
            ("quant_method", json!("awq")),
            ("quant_method", json!("gptq")),
            ("quant_method", json!("compressed-tensors")),
            ("activation_scheme", json!("static")),
            ("fmt", json!("e5m2")),
            ("weight_block_size", json!([1, 128])),
            ("weight_block_size", Value::Null),
        ] {
            let mut config = official();
            config[field] = value.clone();
            let error = parse(&config).unwrap_err();
            assert!(
                error.contains(field) && error.contains(&text(&value)) && error.contains("serves quant_method fp8"),
                "{error}"
            );
        }
        assert!(parse(&json!({"quant_algo": "NVFP4"})).unwrap_err().contains("NVFP4"));
        assert!(parse(&json!({"bits": 4})).unwrap_err().contains(r#"{"bits":4}"#));
        let mut config = official();
        config["modules_to_not_convert"] = json!("lm_head");
        assert!(parse(&config).unwrap_err().contains("modules_to_not_convert"));
    }
}
