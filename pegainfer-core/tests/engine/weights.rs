//! Damaged checkpoints: each gives one clear error sentence and never a panic.

use half::{bf16, f16};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::weights::{
    Checkpoint, Columns, Loader, Quantize, Source, SourceTensor, Uniform, WeightsError, uniform,
};
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::path::{Path, PathBuf};

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pegainfer-weights-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
    fn write(&self, file: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(file), bytes).unwrap();
    }
    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn values(n: usize, first: usize) -> Vec<bf16> {
    (first..first + n).map(|i| bf16::from_f32(i as f32)).collect()
}

fn file(tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let views = tensors.iter().map(|(n, d, s, b)| (*n, TensorView::new(*d, s.clone(), b).unwrap()));
    serialize(views, None).unwrap()
}

fn bf16_tensor(name: &str, rows: usize, first: usize) -> (&str, Dtype, Vec<usize>, Vec<u8>) {
    (name, Dtype::BF16, vec![rows, 4], bytemuck::cast_slice(&values(rows * 4, first)).to_vec())
}

fn open_error(dir: &Dir) -> String {
    let text = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(!text.contains('\n'), "one sentence: {text}");
    text
}

#[test]
fn shards_are_found_through_the_index_and_stacked() {
    let dir = Dir::new("shards");
    dir.write("a.safetensors", &file(&[bf16_tensor("q", 3, 0)]));
    dir.write("b.safetensors", &file(&[bf16_tensor("k", 2, 12)]));
    dir.write(
        "model.safetensors.index.json",
        br#"{"metadata":{},"weight_map":{"q":"a.safetensors","k":"b.safetensors"}}"#,
    );
    let source = Source::open(dir.path()).unwrap();
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let mut done = 0;
    let mut progress = |bytes| done += bytes;
    let parts = [SourceTensor::whole("q".into(), 3), SourceTensor::whole("k".into(), 2)];
    let qk = Loader::run(&mut exec, &source, &mut progress, |loader| loader.stacked("qk", &parts, 4)).unwrap();
    assert_eq!(qk.host::<bf16>(), values(20, 0));
    assert_eq!(done, 40, "progress counts loaded bytes");
    let error = Loader::run(&mut exec, &source, &mut |_| {}, |loader| loader.matrix("q".into(), 4, 4)).unwrap_err();
    assert!(matches!(error, WeightsError::Mismatch { .. }), "{error}");
    assert!(error.to_string().contains("q is BF16 [3, 4]"), "{error}");
    let missing = |loader: &mut Loader<'_>| loader.vector("missing".into(), 4);
    let error = Loader::run(&mut exec, &source, &mut |_| {}, missing).unwrap_err();
    assert!(error.to_string().contains("no tensor missing"), "{error}");
}

#[test]
fn a_file_cut_short_after_it_was_opened_is_an_error() {
    let dir = Dir::new("cut");
    let whole = file(&[bf16_tensor("q", 3, 0)]);
    dir.write("model.safetensors", &whole);
    let source = Source::open(dir.path()).unwrap();
    dir.write("model.safetensors", &whole[..whole.len() - 1]);
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let error = Loader::run(&mut exec, &source, &mut |_| {}, |loader| loader.matrix("q".into(), 3, 4)).unwrap_err();
    assert!(error.to_string().contains("model.safetensors"), "{error}");
}

#[test]
fn an_empty_directory_and_a_missing_shard_are_named() {
    let dir = Dir::new("empty");
    assert!(open_error(&dir).contains("model.safetensors"));
    dir.write("model.safetensors.index.json", br#"{"weight_map":{"q":"gone.safetensors"}}"#);
    let error = open_error(&dir);
    assert!(error.contains("gone.safetensors") && error.contains("for q"), "{error}");
    for file in ["../x.safetensors", "/x.safetensors", "a/x.safetensors", ".."] {
        let index = format!("{{\"weight_map\":{{\"q\":\"{file}\"}}}}");
        dir.write("model.safetensors.index.json", index.as_bytes());
        let error = open_error(&dir);
        assert!(error.contains(&format!("index.json names \"{file}\", which is not a file of the")), "{error}");
    }
    dir.write("model.safetensors.index.json", b"{");
    assert!(open_error(&dir).contains("index.json is damaged"));
}

#[test]
fn truncation_at_any_byte_and_random_headers_are_refused() {
    let dir = Dir::new("truncated");
    let whole = file(&[bf16_tensor("q", 3, 0)]);
    for length in 0..whole.len() {
        dir.write("model.safetensors", &whole[..length]);
        let error = open_error(&dir);
        assert!(error.contains("model.safetensors"), "{error}");
    }
    let mut garbage = whole;
    garbage[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    dir.write("model.safetensors", &garbage);
    open_error(&dir);
}

#[test]
fn a_pointer_of_git_lfs_is_told_as_such() {
    let dir = Dir::new("lfs");
    dir.write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n");
    let error = open_error(&dir);
    assert!(
        error
            .ends_with("model.safetensors is a pointer of git-lfs, not the weights: run git lfs pull in its directory")
    );
}

#[test]
fn another_dtype_is_refused_by_name() {
    let dir = Dir::new("dtype");
    dir.write("model.safetensors", &file(&[("q", Dtype::F64, vec![1, 4], vec![0; 32])]));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let error = checkpoint.bf16("q", &[1, 4]).unwrap_err().to_string();
    assert!(error.contains("F64") && error.contains("BF16 or F16 or F32"), "{error}");
}

#[test]
fn f32_and_f16_weights_are_rounded_to_the_nearest_bf16() {
    // Rows that no chunk of a read divides; the first elements are ties, overflow, subnormal values and NaN.
    let (rows, cols) = (3, (1 << 18) + 77);
    let special = [1.0f32 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -0.0, 3.4e38, 1e-40, f32::NEG_INFINITY, 65504.0, 6e-8];
    let value = |i: usize| special.get(i).copied().unwrap_or((i % 9973) as f32 * 0.37 - 1000.0);
    let wide: Vec<f32> = (0..rows * cols).map(value).collect();
    let half: Vec<f16> = wide.iter().map(|value| f16::from_f32(*value)).collect();
    let dir = Dir::new("rounded");
    let bytes = |values: &[u8]| values.to_vec();
    dir.write(
        "model.safetensors",
        &file(&[
            ("f32", Dtype::F32, vec![rows, cols], bytes(bytemuck::cast_slice(&wide))),
            ("f16", Dtype::F16, vec![rows, cols], bytes(bytemuck::cast_slice(&half))),
            ("norm", Dtype::F32, vec![8], bytes(bytemuck::cast_slice(&special))),
        ]),
    );
    let (source, mut exec) = (Source::open(dir.path()).unwrap(), Exec::cpu(Isa::best(), Some(2)).unwrap());
    let of_f32: Vec<bf16> = wide.iter().map(|value| bf16::from_f32(*value)).collect();
    let of_f16: Vec<bf16> = half.iter().map(|value| bf16::from_f32(value.to_f32())).collect();
    let mut reported = 0;
    let load = |loader: &mut Loader<'_>| {
        let parts = ["f32", "f16"].map(|name| SourceTensor::whole(name.to_owned(), rows));
        let stacked = loader.stacked("both", &parts, cols)?;
        let norm = loader.vector("norm".to_owned(), 8)?;
        let columns = ["f32", "f16"].map(|name| {
            let part = Columns { stored: cols, part: 5..cols - 3 };
            loader.stacked(name, &[SourceTensor::whole(name.to_owned(), rows)], part)
        });
        Ok((stacked, norm, columns))
    };
    let (stacked, norm, columns) = Loader::run(&mut exec, &source, &mut |bytes| reported += bytes, load).unwrap();
    let bits = |values: &[bf16]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert!(bits(stacked.host()) == bits(&[&of_f32[..], &of_f16[..]].concat()), "stacked");
    assert_eq!(bits(norm.host()), bits(&of_f32[..8]));
    for (columns, whole) in columns.into_iter().zip([&of_f32, &of_f16]) {
        let expected: Vec<bf16> = whole.chunks(cols).flat_map(|row| &row[5..cols - 3]).copied().collect();
        assert!(bits(columns.unwrap().host()) == bits(&expected), "columns");
    }
    assert_eq!(reported, 2 * (2 * rows * cols + 8 + 2 * rows * (cols - 8)) as u64, "bytes of bf16");
}

#[test]
fn tensors_are_equal_if_every_byte_is() {
    let dir = Dir::new("equal");
    let rows = (5 << 20) / 8 + 3;
    let (name, dtype, shape, bytes) = bf16_tensor("a", rows, 0);
    let changed = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        bytes
    };
    let square = (vec![4, rows], Dtype::BF16);
    dir.write(
        "model.safetensors",
        &file(&[
            (name, dtype, shape.clone(), bytes.clone()),
            ("copy", dtype, shape.clone(), bytes.clone()),
            ("last", dtype, shape.clone(), changed(bytes.len() - 1)),
            ("first", dtype, shape.clone(), changed(0)),
            ("shape", square.1, square.0, bytes.clone()),
            ("dtype", Dtype::F16, shape, bytes.clone()),
        ]),
    );
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let equal = ["a", "copy", "last", "first", "shape", "dtype"].map(|other| checkpoint.equal("a", other).unwrap());
    assert_eq!(equal, [true, true, false, false, false, false]);
    assert!(checkpoint.equal("a", "b").unwrap_err().to_string().contains("no tensor b"));
}

#[test]
fn dummy_weights_depend_on_seed_and_name_alone() {
    let load = |threads, seed, name: &str| {
        let mut exec = Exec::cpu(Isa::Portable, Some(threads)).unwrap();
        let on_host: Uniform = |_, seed, limit, out| {
            uniform(out.host_mut(), seed, limit);
            Ok(())
        };
        let source = Source::Dummy { seed, std: 0.02, uniform: on_host, random_bytes: |_, _, _, _| Ok(()) };
        let matrix = |loader: &mut Loader<'_>| loader.matrix(name.into(), 300, 1000);
        let tensor = Loader::run(&mut exec, &source, &mut |_| {}, matrix).unwrap();
        tensor.host::<bf16>().to_vec()
    };
    let base = load(1, 1, "q");
    assert_eq!(base, load(3, 1, "q"));
    assert_ne!(base, load(1, 2, "q"));
    assert_ne!(base, load(1, 1, "k"));
    let n = base.len() as f64;
    let mean = base.iter().map(|v| v.to_f64()).sum::<f64>() / n;
    let std = (base.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / n).sqrt();
    assert!(mean.abs() < 2e-4 && (std - 0.02).abs() < 2e-4, "mean {mean}, std {std}");
}

#[test]
fn small_tensors_are_widened_from_either_type_and_converted() {
    let dir = Dir::new("converted");
    let wide = [1.5f32, -2.25, 1e-30];
    dir.write(
        "model.safetensors",
        &file(&[
            ("narrow", Dtype::BF16, vec![3], bytemuck::cast_slice(&values(3, 5)).to_vec()),
            ("wide", Dtype::F32, vec![3], bytemuck::cast_slice(&wide).to_vec()),
        ]),
    );
    let source = Source::open(dir.path()).unwrap();
    let mut exec = Exec::cpu(Isa::Portable, Some(1)).unwrap();
    let double = |values: Vec<f32>| values.into_iter().map(|value| 2.0 * value).collect();
    let loaded = Loader::run(&mut exec, &source, &mut |_| {}, |loader| {
        let narrow = loader.converted("narrow".to_owned(), &[3], 0.0, &[3, 1], double)?;
        Ok((narrow, loader.converted("wide".to_owned(), &[3], 0.0, &[3], |values| values)?))
    });
    let (narrow, unchanged) = loaded.unwrap();
    assert_eq!((narrow.shape(), narrow.host::<f32>()), (&[3, 1][..], &[10.0, 12.0, 14.0][..]));
    assert_eq!(unchanged.host::<f32>(), wide);
    let mut names: Vec<&str> = source.names().collect();
    names.sort_unstable();
    assert_eq!(names, ["narrow", "wide"]);
    let wrong = Loader::run(&mut exec, &source, &mut |_| {}, |loader| {
        loader.converted("wide".to_owned(), &[4], 0.0, &[4], |values| values)
    });
    let error = wrong.unwrap_err().to_string();
    assert!(error.contains("wide is F32 [3], but config.json asks for BF16 or F16 or F32 [4]"), "{error}");
}

#[test]
fn shards_are_found_where_only_the_files_were_renamed() {
    for (listed, found) in [
        ("model.safetensors-00001-of-00001.safetensors", "model-00001-of-00001.safetensors"),
        ("model-00001-of-00001.safetensors", "model.safetensors-00001-of-00001.safetensors"),
    ] {
        let dir = Dir::new("renamed");
        dir.write(found, &file(&[bf16_tensor("q", 3, 0)]));
        dir.write("model.safetensors.index.json", format!(r#"{{"weight_map":{{"q":"{listed}"}}}}"#).as_bytes());
        assert!(Checkpoint::open(dir.path()).unwrap().contains("q"));
    }
}

/// An FP8 weight of ones, `[rows, 200]`, and its scales.
fn fp8_tensors(rows: usize, scales: &[usize]) -> Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)> {
    let ones: Vec<u8> = scales.iter().product::<usize>().checked_mul(4).map(|n| vec![0; n]).unwrap();
    vec![
        ("w", Dtype::F8_E4M3, vec![rows, 200], vec![0x38; rows * 200]),
        ("w_scale_inv", Dtype::F32, scales.to_vec(), ones),
    ]
}

#[test]
fn scales_and_fp8_weights_must_belong_together() {
    let dir = Dir::new("scales");
    let check = |tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)], quantized: bool| {
        dir.write("model.safetensors", &file(tensors));
        Checkpoint::open(dir.path()).unwrap().check_block_scales(quantized).map_err(|e| e.to_string())
    };
    let whole = fp8_tensors(130, &[2, 2]);
    assert_eq!(check(&whole, true), Ok(()));
    let refused = |tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)], quantized, words: &str| {
        let error = check(tensors, quantized).unwrap_err();
        assert!(error.contains(words) && !error.contains('\n'), "{error}");
    };
    refused(&whole, false, "w is F8_E4M3, but config.json has no quantization_config");
    refused(&whole[..1], true, "w is F8_E4M3, but the checkpoint has no w_scale_inv");
    refused(&whole[1..], true, "w_scale_inv has scales for w, which the checkpoint does not have");
    refused(&fp8_tensors(130, &[1, 2]), true, "w_scale_inv F32 [1, 2], expected BF16, F16 or F32 [2, 2]");
    let mut plain = whole.clone();
    plain[0] = bf16_tensor("w", 3, 0);
    refused(&plain, true, "w_scale_inv has scales for w, which is BF16 [3, 4], not F8_E4M3");
    let mut bytes = whole.clone();
    bytes[1] = ("w_scale_inv", Dtype::U8, vec![2, 2], vec![1; 4]);
    refused(&bytes, true, "w_scale_inv U8 [2, 2], expected BF16, F16 or F32");
}

#[test]
fn fp8_weights_that_are_no_numbers_are_refused() {
    let dir = Dir::new("nan");
    let mut exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let mut load = |tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]| {
        dir.write("model.safetensors", &file(tensors));
        let source = Source::open(dir.path()).unwrap();
        let parts = [SourceTensor::whole("w".into(), 130)];
        let quantize: Quantize = |_, _, _, _| panic!("it is FP8");
        Loader::run(&mut exec, &source, &mut |_| {}, |loader| {
            let loaded = loader.fp8("w", &parts, 200, quantize);
            assert!(loader.unused().is_empty());
            loaded
        })
        .map_err(|error| error.to_string())
    };
    let mut tensors = fp8_tensors(130, &[2, 2]);
    let (codes, scales) = load(&tensors).unwrap();
    assert_eq!((codes.shape(), codes.host::<u8>()[0], scales.host::<f32>()), (&[130, 200][..], 0x38, &[0.0; 4][..]));
    tensors[0].3[7] = 0xff;
    assert!(load(&tensors).unwrap_err().contains("w has NaN or infinite values"));
    tensors[0].3[7] = 0;
    tensors[1].3[0..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    assert!(load(&tensors).unwrap_err().contains("w_scale_inv has NaN or infinite values"));
}
