use super::*;
use crate::config_file::{Overrides, text};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::weights::Source;
use pegainfer_core::weights::grouped::{Offset, ScaleDType};
use rules::Modules;
use safetensors::tensor::TensorView;
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
        ("quant_method", json!("bitsandbytes")),
        ("quant_method", json!("hqq")),
        ("quant_method", json!("torchao")),
        ("activation_scheme", json!("static")),
        ("fmt", json!("e5m2")),
        ("weight_block_size", json!([1, 128])),
        ("weight_block_size", Value::Null),
    ] {
        let mut config = official();
        config[field] = value.clone();
        let error = parse(&config).unwrap_err();
        assert!(
            error.contains(field) && error.contains(&text(&value)) && error.contains("quant_method fp8"),
            "{error}"
        );
    }
    assert!(parse(&json!({"bits": 4})).unwrap_err().contains(r#"{"bits":4}"#));
    let mut config = official();
    config["modules_to_not_convert"] = json!("lm_head");
    assert!(parse(&config).unwrap_err().contains("modules_to_not_convert"));
}

fn awq() -> Value {
    json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "GEMM",
        "modules_to_not_convert": ["visual"]})
}

fn gptq() -> Value {
    json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": true, "desc_act": false,
        "dynamic": {"-:.*attn.*": {}, "+:.*down_proj": {"group_size": 32}}})
}

fn auto_round() -> Value {
    json!({"quant_method": "auto-round", "bits": 4, "group_size": -1, "sym": false, "data_type": "int",
        "packing_format": "auto_round:auto_gptq", "extra_config": {"x.k_proj": {"bits": 16}}})
}

fn compressed(format: &str, weights: &Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head", "re:.*attn.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null}}})
}

fn int4(group: &Value, symmetric: bool) -> Value {
    json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric})
}

fn modelopt(algo: &str) -> Value {
    json!({"quant_method": "modelopt", "quant_algo": algo, "exclude_modules": ["lm_head", "*attn*"]})
}

#[test]
fn methods_describe_the_formats_of_modules_without_a_checkpoint() {
    let group = |format| StoredFormat::Grouped(format);
    let int = |size, dtype, offset| group(GroupFormat::int(4, size, dtype, offset));
    let awq_int = int(128, ScaleDType::F16, Offset::Zero);
    let [attn, q, down, head] = ["x.attn.q_proj", "x.k_proj", "x.down_proj", "lm_head"];
    let bf16 = StoredFormat::Bf16;
    let ct_int = |size, offset| int(size, ScaleDType::Bf16, offset);
    let fp8 =
        |strategy: &str| json!({"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [128, 128]});
    for (config, [in_attn, in_q, in_down]) in [
        (awq(), [awq_int, awq_int, awq_int]),
        (gptq(), [bf16, int(64, ScaleDType::F16, Offset::None), int(32, ScaleDType::F16, Offset::None)]),
        (auto_round(), [int(256, ScaleDType::F16, Offset::Zero), bf16, int(256, ScaleDType::F16, Offset::Zero)]),
        (
            compressed("pack-quantized", &int4(&json!(128), true)),
            [bf16, ct_int(128, Offset::None), ct_int(128, Offset::None)],
        ),
        (
            compressed("pack-quantized", &int4(&json!(32), false)),
            [bf16, ct_int(32, Offset::Zero), ct_int(32, Offset::Zero)],
        ),
        (
            compressed("nvfp4-pack-quantized", &json!({"num_bits": 4, "type": "float"})),
            [bf16, group(GroupFormat::NVFP4), group(GroupFormat::NVFP4)],
        ),
        (
            compressed("mxfp4-pack-quantized", &json!({"num_bits": 4, "type": "float"})),
            [bf16, group(GroupFormat::MXFP4), group(GroupFormat::MXFP4)],
        ),
        (
            compressed("float-quantized", &fp8("channel")),
            [bf16, group(GroupFormat::fp8(256, ScaleDType::Bf16)), group(GroupFormat::fp8(256, ScaleDType::Bf16))],
        ),
        (compressed("float-quantized", &fp8("block")), [bf16, StoredFormat::Fp8, StoredFormat::Fp8]),
        (modelopt("NVFP4"), [bf16, group(GroupFormat::NVFP4), group(GroupFormat::NVFP4)]),
        (
            modelopt("FP8"),
            [bf16, group(GroupFormat::fp8(256, ScaleDType::F32)), group(GroupFormat::fp8(256, ScaleDType::F32))],
        ),
    ] {
        let quantization = parse(&config).unwrap().unwrap();
        let format = |module: &str| quantization.format(&format!("{module}.weight"), 256);
        assert_eq!([attn, q, down].map(format), [in_attn, in_q, in_down], "{config}");
        assert_eq!(format(head), bf16, "{config}");
    }
    let mut config = gptq();
    config["lm_head"] = json!(true);
    assert_eq!(parse(&config).unwrap().unwrap().format(HEAD, 256), int(64, ScaleDType::F16, Offset::None));
    let mixed = json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "x.down_proj": {"quant_algo": "NVFP4"}, "x.k_proj": {"quant_algo": "FP8"}}});
    let mixed = parse(&mixed).unwrap().unwrap();
    let formats = [attn, q, down].map(|module| mixed.format(&format!("{module}.weight"), 256));
    assert_eq!(formats, [bf16, group(GroupFormat::fp8(256, ScaleDType::F32)), group(GroupFormat::NVFP4)]);
}

#[test]
fn the_configuration_tells_how_zero_points_are_stored() {
    let zeros = |config: &Value| parse(config).unwrap().unwrap().zeros;
    let v1 = ZeroPoints { less_one: true, symmetric: true };
    assert_eq!(zeros(&gptq()), v1);
    for (field, value, expected) in [
        ("checkpoint_format", json!("gptq_v2"), ZeroPoints { less_one: false, ..v1 }),
        ("quant_method", json!("gptq_v2"), ZeroPoints { less_one: false, ..v1 }),
        ("format", json!("gptq"), v1),
        ("sym", json!(false), ZeroPoints { symmetric: false, ..v1 }),
    ] {
        let mut config = gptq();
        config[field] = value;
        assert_eq!(zeros(&config), expected, "{field}");
    }
    assert_eq!(zeros(&auto_round()), ZeroPoints::default());
    let mut config = auto_round();
    config["packing_format"] = json!("auto_round:gptqmodel");
    assert_eq!(zeros(&config), ZeroPoints { less_one: false, symmetric: false });
}

#[test]
fn what_a_method_cannot_store_in_four_bits_is_refused_by_name() {
    let eight = json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true});
    let ordered = json!({"num_bits": 4, "type": "int", "group_size": 128, "actorder": "group"});
    let block = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]});
    for (config, named, value) in [
        (with(awq(), "bits", json!(8)), "bits", "8"),
        (with(awq(), "version", json!("gemv")), "version", "gemv"),
        (with(awq(), "group_size", json!(100)), "group_size", "100"),
        (with(gptq(), "bits", json!(3)), "bits", "3"),
        (with(gptq(), "checkpoint_format", json!("marlin")), "checkpoint_format", "marlin"),
        (with(gptq(), "pack_dtype", json!("int64")), "pack_dtype", "int64"),
        (with(gptq(), "dynamic", json!({"+:.*up.*": {"bits": 8}})), "dynamic.bits", "8"),
        (with(auto_round(), "bits", json!(2)), "bits", "2"),
        (with(auto_round(), "packing_format", json!("auto_round:marlin")), "packing_format", "marlin"),
        (with(auto_round(), "extra_config", json!({"x": {"bits": 8}})), "extra_config.bits", "8"),
        (with(auto_round(), "data_type", json!("mx_fp")), "data_type", "mx_fp"),
        (compressed("pack-quantized", &eight), "config_groups.weights", "int of 8 bits"),
        (compressed("int-quantized", &eight), "config_groups.weights", "int of 8 bits"),
        (compressed("marlin-24", &int4(&json!(128), true)), "format", "marlin-24"),
        (compressed("pack-quantized", &ordered), "config_groups.weights.actorder", "group"),
        (compressed("float-quantized", &block), "config_groups.weights.block_structure", "[64,64]"),
        (
            with(compressed("dense", &Value::Null), "sparsity_config", json!({"format": "sparse-24-bitmask"})),
            "sparsity_config.format",
            "sparse-24-bitmask",
        ),
        (modelopt("NVFP4_AWQ"), "quant_algo", "NVFP4_AWQ"),
        (modelopt("W4A8_AWQ"), "quant_algo", "W4A8_AWQ"),
    ] {
        let error = parse(&config).unwrap_err();
        assert!(error.contains(&format!("quantization_config.{named}")) && error.contains(value), "{config}: {error}");
    }
}

/// `config` with another value of a field.
fn with(mut config: Value, field: &str, value: Value) -> Value {
    config[field] = value;
    config
}

#[test]
fn modules_are_named_by_patterns() {
    let contain = |modules: Option<Modules>, module: &str| modules.unwrap().contain(module);
    assert!(contain(Modules::matching(r".*layers\.4\.mlp"), "model.layers.4.mlp.down_proj"));
    assert!(!contain(Modules::matching(r"layers\.4"), "model.layers.4.mlp"), "patterns match from the start");
    assert!(contain(Modules::wildcard("model*attn"), "model.x.attn"));
    assert!(!contain(Modules::wildcard("model*attn"), "model.x.attn.q"));
    assert_eq!(Modules::matching("(?!visual).*"), None, "syntax of Python that is not supported");
}

#[test]
fn older_files_next_to_the_configuration_are_read() {
    let dir = std::env::temp_dir().join(format!("pegainfer-quantize-config-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let read = |file: &str, content: &Value| {
        std::fs::write(dir.join("config.json"), "{}").unwrap();
        std::fs::write(dir.join(file), content.to_string()).unwrap();
        let quantization = ConfigFile::read(&dir, "Test").unwrap().quantization(&[]).map_err(|e| e.to_string());
        std::fs::remove_file(dir.join(file)).unwrap();
        quantization.map(|quantization| quantization.unwrap().format("x.down_proj.weight", 256))
    };
    let older = json!({"bits": 4, "group_size": 128, "sym": true, "desc_act": false});
    let int4 = GroupFormat::int(4, 128, ScaleDType::F16, Offset::None);
    assert_eq!(read("quantize_config.json", &older), Ok(StoredFormat::Grouped(int4)));
    let nvidia = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}});
    assert_eq!(read("hf_quant_config.json", &nvidia), Ok(StoredFormat::Grouped(GroupFormat::NVFP4)));
    assert!(read("quantize_config.json", &json!({"bits": 2})).unwrap_err().contains("bits = 2"));
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn bf16_weights_are_rounded_to_int4_at_load() {
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let config = ConfigFile::parse("{}", "Test").unwrap();
    let config = config.with(Overrides { quantization: Some(AtLoad::Int4), ..Overrides::default() });
    let quantization = config.quantization(&["in_proj_a"]).unwrap().unwrap();
    assert!(!quantization.has_blocks());
    let dir = std::env::temp_dir().join(format!("pegainfer-int4-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let value = |i: usize| bf16::from_f32((i * 37 % 1009) as f32 / 504.0 - 1.0);
    let weights: Vec<bf16> = (0..40 * 192).map(value).collect();
    let view = || TensorView::new(safetensors::Dtype::BF16, vec![40, 192], bytemuck::cast_slice(&weights)).unwrap();
    let tensors = ["x.q.weight", "x.in_proj_a.weight"].map(|name| (name, view()));
    safetensors::serialize_to_file(tensors, None, &dir.join("model.safetensors")).unwrap();
    let source = Source::open(&dir).unwrap();
    let parts = ["x.q.weight", "x.in_proj_a.weight"].map(|name| SourceTensor::whole(name.to_owned(), 40));
    let load = |loader: &mut Loader<'_>| load_projection(loader, Some(&quantization), "x", &parts, 192);
    let matrix = Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let Matrix::Stacked(loaded) = &matrix else { panic!("{matrix:?}") };
    // 192 columns are three groups of 64.
    let format = GroupFormat::int(4, 64, ScaleDType::Bf16, Offset::None);
    assert!(matches!(loaded[0], Matrix::Grouped { format: found, .. } if found == format), "{loaded:?}");
    assert!(matches!(loaded[1], Matrix::Bf16(_)), "{loaded:?}");
    for (i, (w, rounded)) in weights.iter().zip(loaded[0].dequantize()).enumerate() {
        assert!((w.to_f32() - rounded).abs() <= 0.54 / 7.5, "{i}: {rounded} of {w}");
    }
}
