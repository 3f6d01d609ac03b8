//! Weights of one module `x`, `[64, 256]`, with the config.json that explains them.

use super::*;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::small_floats::e4m3;
use pegainfer_core::weights::Source;
use pegainfer_testing::TempDir;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize_to_file};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::Path;

/// A file of `fixtures/grouped` of pegainfer-core, which has `dequantized`, the values of an independent reader.
fn fixture(kind: &str) -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-core/tests/fixtures/grouped");
    std::fs::read(dir.join(format!("{kind}.safetensors"))).unwrap()
}

fn values(view: &TensorView<'_>) -> Vec<f32> {
    view.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// The values of the weight of module `x` with these tensors, as config.json says that they are stored.
fn loaded(quantization_config: &Value, tensors: &[(String, TensorView<'_>)]) -> Vec<f32> {
    let dir = TempDir::new("quantization-file");
    let config = json!({"quantization_config": quantization_config}).to_string();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let tensors = tensors.iter().map(|(name, view)| (name, view.clone()));
    serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    let quantization = ConfigFile::read(dir.path(), "Test").unwrap().quantization(&[]).unwrap();
    let source = Source::open(dir.path()).unwrap();
    let part = [SourceTensor::whole("x.weight".to_owned(), 64)];
    let load = |loader: &mut Loader<'_>| {
        let matrix = load_projection(loader, quantization.as_ref(), "x", &part, 256)?;
        assert!(loader.unused().is_empty(), "{:?}", loader.unused());
        Ok(matrix)
    };
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap().dequantize()
}

/// AutoRound writes GPTQ's tensors without `g_idx`, or AWQ's.
#[test]
fn auto_round_files_have_the_values_of_their_packing() {
    for (kind, packing) in [
        ("gptq-g128-asym", "auto_round:auto_gptq"),
        ("gptq-g128-asym-v2", "auto_round"),
        ("gptq-g128-asym-v2", "auto_round:gptqmodel"),
        ("awq-g128", "auto_round:auto_awq"),
    ] {
        let config = json!({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": false,
            "data_type": "int", "packing_format": packing});
        let file = fixture(kind);
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let expected = values(&tensors.tensor("dequantized").unwrap());
        let stored = tensors.iter().filter(|(name, _)| !["dequantized", "g_idx"].contains(name));
        let stored: Vec<_> = stored.map(|(name, view)| (format!("x.{name}"), view)).collect();
        assert_eq!(loaded(&config, &stored), expected, "{kind} as {packing}");
    }
}

#[test]
fn compressed_tensors_with_blocks_of_fp8_have_their_values() {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]});
    let config = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}});
    let file = fixture("fp8-channel");
    let weight = SafeTensors::deserialize(&file).unwrap().tensor("weight").unwrap();
    let scales = [0.01f32, 3.5];
    let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let expected: Vec<f32> =
        weight.data().iter().enumerate().map(|(i, code)| e4m3(*code) * scales[i % 256 / 128]).collect();
    let scale = TensorView::new(Dtype::F32, vec![1, 2], &bytes).unwrap();
    let stored = [("x.weight".to_owned(), weight), ("x.weight_scale".to_owned(), scale)];
    assert_eq!(loaded(&config, &stored), expected);
}

/// Ranks may cut an output matrix anywhere, but not within blocks of 128 rows.
#[test]
fn an_output_matrix_in_blocks_is_not_cut_within_them() {
    let (dir, scales) = (TempDir::new("head-in-blocks"), [0u8; 4 * 4]);
    let codes = TensorView::new(Dtype::F8_E4M3, vec![400, 128], &[0; 400 * 128]).unwrap();
    let scales = TensorView::new(Dtype::F32, vec![4, 1], &scales).unwrap();
    let tensors = [(HEAD, codes), ("lm_head.weight_scale_inv", scales)];
    serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    let (source, mut exec) = (Source::open(dir.path()).unwrap(), Exec::cpu(Isa::best(), Some(1)).unwrap());
    let mut load = |part: Range<usize>| {
        let rows = [SourceTensor { name: HEAD.to_owned(), rows: 400, part }];
        let load = |loader: &mut Loader<'_>| load_quantized_head(loader, None, &rows, 128);
        Loader::run(&mut exec, &source, &mut |_| {}, load).map_err(|error| error.to_string())
    };
    assert_eq!(load(256..400).unwrap().unwrap().shape(), (144, 128));
    let error = load(200..400).unwrap_err();
    assert!(error.starts_with("lm_head.weight is FP8 in blocks of 128 rows"), "{error}");
}
