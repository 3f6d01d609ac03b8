//! Columns of GGUF matrices that ranks share although those of a rank are not neighbours.

use super::{V1, read};
use half::{bf16, f16};
use pegainfer_core::rng;
use pegainfer_core::weights::Checkpoint;
use pegainfer_core::weights::grouped::GroupedWeight;
use pegainfer_testing::TempDir;
use pegainfer_testing::gguf::Writer;

const NAME: &str = "model.language_model.layers.0.linear_attn.out_proj.weight";
const ROWS: usize = 3;
/// Two tiles, of which each of two ranks has half.
const COLUMNS: usize = 1024;

/// A file with an output projection of two value heads for each key head, `[3, 1024]` in the type `id`.
fn write(dir: &TempDir, id: u32, bytes: Vec<u8>) -> Checkpoint {
    let mut writer = Writer::default();
    writer.pair("general.architecture", "qwen35").pair("qwen35.block_count", 1u32);
    writer.pair("qwen35.ssm.group_count", 4u32).pair("qwen35.ssm.time_step_rank", 8u32);
    writer.tensor("blk.0.ssm_out.weight", &[ROWS, COLUMNS], id, bytes);
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    Checkpoint::open(&path).unwrap()
}

/// Random blocks of `size` bytes with scales of 1/64 at these bytes.
fn blocks(count: usize, size: usize, scales: &[usize]) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..count * size).map(|i| (rng::bits(5, i as u64) >> 32) as u8).collect();
    let one = f16::from_f32(1.0 / 64.0).to_le_bytes();
    for block in bytes.chunks_exact_mut(size) {
        scales.iter().for_each(|scale| block[*scale..scale + 2].copy_from_slice(&one));
    }
    bytes
}

/// The columns of a rank, in the order of its own tiles.
fn of_rank<T: Copy>(whole: &[T], rank: usize) -> Vec<T> {
    let (tile, share) = (COLUMNS / 2, COLUMNS / 4);
    let starts = move |row: usize| [0, 1].map(|t| row * COLUMNS + t * tile + rank * share);
    (0..ROWS).flat_map(starts).flat_map(|start| whole[start..start + share].iter().copied()).collect()
}

#[test]
fn ranks_share_each_tile_of_quantised_columns() {
    // Q8_0, Q4_K, and Q6_K, whose codes have two planes.
    for (id, block, size, scales) in [(8, 32, 34, &[0][..]), (12, 256, 144, &[0, 2]), (14, 256, 210, &[208])] {
        let dir = TempDir::new("tiles");
        let checkpoint = write(&dir, id, blocks(ROWS * COLUMNS / block, size, scales));
        let weight = GroupedWeight::open(&checkpoint, NAME, V1).unwrap().unwrap();
        let whole = read(&weight, (0, ROWS), (0, COLUMNS)).unwrap();
        let stored = checkpoint.bf16(NAME, &[ROWS, COLUMNS]).unwrap();
        for rank in [0, 1] {
            let columns = rank * COLUMNS / 2..(rank + 1) * COLUMNS / 2;
            let part = read(&weight, (0, ROWS), (columns.start, columns.end)).unwrap();
            assert_eq!(part, of_rank(&whole, rank), "type {id}, rank {rank}");
            let mut rounded = vec![bf16::ZERO; ROWS * COLUMNS / 2];
            stored.part(COLUMNS, 0..ROWS, columns).read(0, bytemuck::cast_slice_mut(&mut rounded)).unwrap();
            assert!(rounded.iter().copied().eq(part.into_iter().map(bf16::from_f32)), "type {id}, rank {rank}");
        }
        // A quarter of a tile is half of a block of 256.
        let error = weight.cut(0..COLUMNS / 4).map_err(|error| error.to_string());
        assert_eq!(error.is_err(), block == 256, "{error:?}");
        assert!(error.is_ok() || error.unwrap_err().contains("use fewer ranks"));
    }
}

#[test]
fn ranks_share_each_tile_of_plain_columns() {
    let values: Vec<bf16> = (0..ROWS * COLUMNS).map(|i| bf16::from_f32(i as f32)).collect();
    let dir = TempDir::new("tiles-plain");
    let checkpoint = write(&dir, 30, bytemuck::cast_slice(&values).to_vec());
    let stored = checkpoint.bf16(NAME, &[ROWS, COLUMNS]).unwrap();
    for rank in [0, 1] {
        let mut part = vec![bf16::ZERO; ROWS * COLUMNS / 2];
        let columns = rank * COLUMNS / 2..(rank + 1) * COLUMNS / 2;
        stored.part(COLUMNS, 0..ROWS, columns).read(0, bytemuck::cast_slice_mut(&mut part)).unwrap();
        assert_eq!(part, of_rank(&values, rank));
    }
}
