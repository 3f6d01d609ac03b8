//! GGUF files as checkpoints: every block type, value by value.

use half::bf16;
use pegainfer_core::weights::grouped::{GroupedWeight, ZeroPoints};
use pegainfer_core::weights::{Checkpoint, WeightsError};
use std::path::{Path, PathBuf};

/// One matrix `[64, 256]` in every type. Rows 5 to 13 have groups of zeros, of positive values, an outlier, and values
/// 1000 times smaller.
const ROWS: usize = 64;
const COLUMNS: usize = 256;

/// Hash of the f32 bytes that an independent reader gives for each type.
const VALUES: [(&str, u64); 13] = [
    ("F32.weight", 0xbf230052bd1aaade),
    ("F16.weight", 0xbd72ff52893c1978),
    ("BF16.weight", 0xbf230052bd1aaade),
    ("Q8_0.weight", 0xe22dd730bc0e17aa),
    ("Q4_0.weight", 0x0d4ed7f4945e5709),
    ("Q4_1.weight", 0x280e073ff3ee6fbf),
    ("Q5_0.weight", 0x174f004190119472),
    ("Q5_1.weight", 0x7a228abc0b06b286),
    ("Q4_K.weight", 0x96967d7cbe6c9977),
    ("Q5_K.weight", 0x953261e37d436ff0),
    ("Q6_K.weight", 0xba60ca26bb045421),
    ("IQ4_NL.weight", 0xe125a4be3016cbf7),
    ("IQ4_XS.weight", 0x69f05dbd57af9dab),
];

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf-all-types.gguf")
}

/// FNV-1a, 64 bits.
fn hash(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    bytes.fold(0xcbf29ce484222325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100000001b3))
}

/// The values of some rows and columns of a matrix.
fn part(
    checkpoint: &Checkpoint,
    name: &str,
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
) -> Result<Vec<f32>, WeightsError> {
    let (k, n) = (columns.len(), rows.len());
    let weight = GroupedWeight::open(checkpoint, name, ZeroPoints::default())?.unwrap();
    weight.check_shape(ROWS, COLUMNS)?;
    let (code_bytes, scale_bytes) = (weight.format.code_bytes(k), weight.format.scale_bytes(k));
    let (mut codes, mut scales) = (vec![0; n * code_bytes], vec![0; n * scale_bytes]);
    weight.read(rows, columns, &mut codes, &mut scales)?;
    let mut values = vec![0.0; n * k];
    for ((values, codes), scales) in values.chunks_mut(k).zip(codes.chunks(code_bytes)).zip(scales.chunks(scale_bytes))
    {
        weight.format.dequantize_row(codes, scales, k, values);
    }
    Ok(values)
}

fn all(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    match checkpoint.block_type(name) {
        Some(_) => part(checkpoint, name, 0..ROWS, 0..COLUMNS).unwrap(),
        None => checkpoint.widened(name, &[ROWS, COLUMNS]).unwrap(),
    }
}

#[test]
fn every_type_has_the_values_of_an_independent_reader() {
    let checkpoint = Checkpoint::open(&path()).unwrap();
    for (name, expected) in VALUES {
        let values = all(&checkpoint, name);
        assert_eq!(hash(&values), expected, "{name}: {:?}", &values[..8]);
    }
}

#[test]
fn parts_of_a_matrix_are_those_of_the_whole() {
    let checkpoint = Checkpoint::open(&path()).unwrap();
    for (name, _) in VALUES {
        let Some(blocks) = checkpoint.block_type(name) else { continue };
        let whole = all(&checkpoint, name);
        let rows = |rows: std::ops::Range<usize>| whole.chunks(COLUMNS).take(rows.end).skip(rows.start);
        assert_eq!(
            part(&checkpoint, name, 3..9, 0..COLUMNS).unwrap(),
            rows(3..9).flatten().copied().collect::<Vec<_>>()
        );
        let cut = part(&checkpoint, name, 3..9, 64..160);
        if blocks.kind().block_values() == COLUMNS {
            let error = cut.unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("multiples of 256"), "{error}");
        } else {
            let expected: Vec<f32> = rows(3..9).flat_map(|row| &row[64..160]).copied().collect();
            assert_eq!(cut.unwrap(), expected, "{name}");
        }
    }
}

#[test]
fn quantised_matrices_are_read_as_rounded_values() {
    let checkpoint = Checkpoint::open(&path()).unwrap();
    for (name, _) in VALUES {
        let (whole, shape) = (all(&checkpoint, name), [ROWS, COLUMNS]);
        let rounded = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| -> Vec<u8> {
            let rows = whole.chunks(COLUMNS).take(rows.end).skip(rows.start);
            rows.flat_map(|row| &row[columns.clone()]).flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()
        };
        for (rows, columns) in [(0..64, 0..256), (5..14, 0..256), (2..7, 37..201), (1..64, 255..256)] {
            let stored = checkpoint.bf16(name, &shape).unwrap().part(COLUMNS, rows.clone(), columns.clone());
            let expected = rounded(rows, columns);
            let mut read = vec![0; expected.len()];
            // In parts that end inside rows and blocks.
            for (i, part) in read.chunks_mut(2 * 77).enumerate() {
                stored.read(i * 2 * 77, part).unwrap();
            }
            assert!(read == expected, "{name}");
        }
    }
}

#[test]
fn wrong_shapes_and_formats_name_the_tensor() {
    let checkpoint = Checkpoint::open(&path()).unwrap();
    let error = checkpoint.bf16("Q4_K.weight", &[64, 512]).unwrap_err().to_string();
    assert!(error.contains("Q4_K.weight is Q4_K [64, 256], but config.json asks for Q4_K [64, 512]"), "{error}");
    assert!(
        checkpoint
            .widened("Q6_K.weight", &[ROWS, COLUMNS])
            .unwrap_err()
            .to_string()
            .contains("Q6_K.weight is Q6_K [64, 256]")
    );
    assert!(checkpoint.equal("F32.weight", "F16.weight").is_ok_and(|equal| !equal));
    assert!(checkpoint.equal("Q4_0.weight", "IQ4_NL.weight").is_ok_and(|equal| !equal), "equal sizes, other types");
    assert!(checkpoint.equal("Q4_K.weight", "Q4_K.weight").unwrap());
}
