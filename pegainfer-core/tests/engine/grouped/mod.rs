//! Group-quantised weights of one module `x`, `[64, 256]`, in every stored format. `fixtures/grouped` has the tensors of
//! each and `dequantized`, which independent readers computed: AutoAWQ, GPTQModel, compressed-tensors and modelopt.

mod loader;
mod refusals;
mod tiles;

use half::bf16;
use pegainfer_core::weights::grouped::{GroupFormat, GroupedWeight, Offset, ScaleDType, StoredFormat, ZeroPoints};
use pegainfer_core::weights::{Checkpoint, WeightsError};
use pegainfer_testing::TempDir;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use std::path::PathBuf;

const SHAPE: (usize, usize) = (64, 256);
const V1: ZeroPoints = ZeroPoints { less_one: true, symmetric: false };
const V1_SYMMETRIC: ZeroPoints = ZeroPoints { less_one: true, symmetric: true };
const V2: ZeroPoints = ZeroPoints { less_one: false, symmetric: false };

/// Name, dtype, shape and bytes.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// A checkpoint in its own directory.
pub struct Files(TempDir);

impl Files {
    pub fn new(name: &str, tensors: &[Stored]) -> Self {
        let dir = TempDir::new(&format!("grouped-{name}"));
        let views = tensors.iter().map(|(n, d, s, b)| (n.as_str(), TensorView::new(*d, s.clone(), b).unwrap()));
        std::fs::write(dir.path().join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
        Self(dir)
    }

    pub fn open(&self) -> Checkpoint {
        Checkpoint::open(self.0.path()).unwrap()
    }
}

/// The tensors of a kind as those of module `x`, and the values of the weight.
fn fixture(kind: &str) -> (Vec<Stored>, Vec<f32>) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/grouped/{kind}.safetensors"));
    let file = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let values =
        tensors.tensor("dequantized").unwrap().data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let stored = tensors
        .iter()
        .filter(|(name, _)| *name != "dequantized")
        .map(|(name, view)| (format!("x.{name}"), view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    (stored.collect(), values)
}

/// Rows and columns of a weight.
fn read(weight: &GroupedWeight<'_>, rows: (usize, usize), columns: (usize, usize)) -> Result<Vec<f32>, WeightsError> {
    let (count, k) = (rows.1 - rows.0, columns.1 - columns.0);
    let format = weight.cut(columns.0..columns.1)?;
    let mut codes = vec![0; count * format.code_bytes(k)];
    let mut scales = vec![0; count * format.scale_bytes(k)];
    weight.read(rows.0..rows.1, columns.0..columns.1, &mut codes, &mut scales)?;
    let mut out = vec![0.0; count * k];
    let rows = codes.chunks_exact(format.code_bytes(k)).zip(scales.chunks_exact(format.scale_bytes(k)));
    out.chunks_exact_mut(k).zip(rows).for_each(|(out, (c, s))| format.dequantize_row(c, s, k, out));
    Ok(out)
}

/// Number format that a reader computed its values in.
#[derive(Clone, Copy, PartialEq)]
enum Computed {
    F32,
    Bf16,
}

impl Computed {
    fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

fn int4(group: usize, dtype: ScaleDType, offset: Offset) -> GroupFormat {
    GroupFormat::int(4, group, dtype, offset)
}

#[test]
fn every_format_has_the_values_of_its_reference_reader() {
    use Offset::{None, Zero};
    use ScaleDType::{Bf16, F16, F32};
    for (kind, zeros, format, computed) in [
        ("awq-g128", V1, int4(128, F16, Zero), Computed::F32),
        ("awq-g64", V1, int4(64, F16, Zero), Computed::F32),
        ("awq-g32", V1, int4(32, F16, Zero), Computed::F32),
        ("gptq-g128-sym", V1_SYMMETRIC, int4(128, F16, None), Computed::F32),
        ("gptq-g128-sym", V1, int4(128, F16, Zero), Computed::F32),
        ("gptq-g128-asym", V1, int4(128, F16, Zero), Computed::F32),
        ("gptq-g128-asym-v2", V2, int4(128, F16, Zero), Computed::F32),
        ("gptq-g32-sym", V1_SYMMETRIC, int4(32, F16, None), Computed::F32),
        ("gptq-channel-sym", V1_SYMMETRIC, int4(256, F16, None), Computed::F32),
        ("w4a16-g128", V1, int4(128, Bf16, None), Computed::F32),
        ("w4a16-g32", V1, int4(32, Bf16, None), Computed::F32),
        ("w4a16-channel", V1, int4(256, Bf16, None), Computed::F32),
        ("w4a16-g128-asym", V1, int4(128, Bf16, Zero), Computed::F32),
        ("nvfp4", V1, GroupFormat::NVFP4, Computed::Bf16),
        ("nvfp4-modelopt", V1, GroupFormat::NVFP4, Computed::F32),
        ("mxfp4", V1, GroupFormat::MXFP4, Computed::F32),
        ("fp8-channel", V1, GroupFormat::fp8(256, Bf16), Computed::F32),
        ("fp8-tensor", V1, GroupFormat::fp8(256, F32), Computed::F32),
        ("fp8-modelopt", V1, GroupFormat::fp8(256, F32), Computed::F32),
    ] {
        let (stored, expected) = fixture(kind);
        let files = Files::new(kind, &stored);
        let checkpoint = files.open();
        assert_eq!(checkpoint.format("x.weight", zeros).unwrap(), StoredFormat::Grouped(format), "{kind}");
        checkpoint.check_block_scales(true).unwrap();
        let weight = GroupedWeight::open(&checkpoint, "x.weight", zeros).unwrap().unwrap();
        assert_eq!((weight.n, weight.k), SHAPE, "{kind}");
        let values = read(&weight, (0, 64), (0, 256)).unwrap();
        let mut rounded = vec![bf16::ZERO; 64 * 256];
        weight.dequantize(0..64, 0..256, &mut rounded).unwrap();
        for (i, ((value, expected), rounded)) in values.iter().zip(expected).zip(rounded).enumerate() {
            // Equal but for the sign of zero.
            assert_eq!(computed.round(*value), expected, "{kind} {i}");
            assert_eq!(rounded, bf16::from_f32(*value), "{kind} {i}");
        }
        // Rows that begin and end inside words of eight, and columns from group 1 on.
        let first = format.cut_columns(256);
        for (rows, columns) in [((5, 38), (0, 256)), ((16, 24), (first % 256, 256)), ((3, 4), (256 - first, 256))] {
            let part = read(&weight, rows, columns).unwrap();
            let whole = values.chunks_exact(256).take(rows.1).skip(rows.0).flat_map(|row| &row[columns.0..columns.1]);
            assert!(part.iter().eq(whole), "{kind} {rows:?} {columns:?}");
        }
    }
}

#[test]
fn columns_in_the_order_of_activations_are_sorted_by_their_group() {
    for (kind, zeros, format, part) in [
        ("gptq-g64-actorder-asym", V1, int4(64, ScaleDType::F16, Offset::Zero), (64, 192)),
        ("gptq-g128-actorder-sym", V1_SYMMETRIC, int4(128, ScaleDType::F16, Offset::None), (128, 256)),
    ] {
        let (stored, expected) = fixture(kind);
        let files = Files::new(kind, &stored);
        let checkpoint = files.open();
        assert_eq!(checkpoint.format("x.weight", zeros).unwrap(), StoredFormat::ActOrder(format));
        let weight = GroupedWeight::open(&checkpoint, "x.weight", zeros).unwrap().unwrap();
        let order = weight.permutation.clone().unwrap();
        for columns in [(0, 256), part] {
            let values = read(&weight, (3, 64), columns).unwrap();
            for (i, value) in values.iter().enumerate() {
                let (row, place) = (3 + i / (columns.1 - columns.0), columns.0 + i % (columns.1 - columns.0));
                let from = order[place] as usize;
                assert_eq!(*value, expected[row * 256 + from], "{kind} row {row} column {from}");
            }
        }
        // In the order of the weight, rounded to bf16.
        let mut rounded = vec![bf16::ZERO; 2 * 100];
        weight.dequantize(7..9, 50..150, &mut rounded).unwrap();
        let whole = expected.chunks_exact(256).skip(7).take(2).flat_map(|row| &row[50..150]);
        assert!(rounded.iter().copied().eq(whole.map(|value| bf16::from_f32(*value))), "{kind}");
    }
}
