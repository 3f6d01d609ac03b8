use super::*;
use crate::config_file::text;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::weights::Source;
use serde_json::{Value, json};

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
        assert_eq!(quantization.rules.scheme(name) == Scheme::Fp8, fp8, "{name}");
    }
}

#[test]
fn rows_in_several_formats_are_stacked() {
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let source = Source::Dummy { seed: 1, std: 0.02, uniform: ops::uniform, random_bytes: ops::random_bytes };
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
