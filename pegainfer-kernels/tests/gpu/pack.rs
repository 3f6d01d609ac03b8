//! Rows of several tensors packed by a GPU, and back: bytes and checksum as the host has them, and the time of a block.

use super::seconds;
use pegainfer_core::cuda::HostWords;
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::tiers::Checksum;
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::cuda;
use pegainfer_kernels::ops::{PackSegment, PackedRows, pack_rows, pack_segments, unpack_rows};

const ROWS: usize = 5;
/// Bytes of a row of each tensor: some whole vectors, some not, some of several parts.
const SHAPES: [&[usize]; 4] = [&[32 << 10; 72], &[20, 65_552, 4, 48], &[100_000], &[16, 16]];
/// Most bytes of a segment.
const MOST: [usize; 3] = [1, 70_000, 8 << 20];

/// Compares and times. Returns whether everything agreed.
pub fn run() -> bool {
    let mut gpu = cuda::open(0, None).unwrap();
    let mut good = true;
    for (shape, most) in SHAPES.into_iter().flat_map(|shape| MOST.map(|most| (shape, most))) {
        let agrees = agrees(&mut gpu, shape, most);
        println!(
            "{} tensors, segments of at most {most} bytes: {}",
            shape.len(),
            if agrees { "ok" } else { "DIFFERENT" }
        );
        good &= agrees;
    }
    time(&mut gpu);
    println!("{}", if good { "all agree" } else { "FAILED" });
    good
}

fn tensors(gpu: &mut Exec, shape: &[usize]) -> Vec<Tensor> {
    let mut tensor = |bytes: &usize| gpu.tensor("rows", &[ROWS, *bytes], DType::U8).unwrap();
    shape.iter().map(&mut tensor).collect()
}

fn words(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes as u64).map(|i| rng::bits(seed, i) as u8).collect()
}

fn contents(gpu: &Exec, tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.elements()];
    gpu.read(tensor, 0, &mut bytes).unwrap();
    bytes
}

fn agrees(gpu: &mut Exec, shape: &[usize], most: usize) -> bool {
    let mut tensors = tensors(gpu, shape);
    let mut hosts: Vec<Vec<u8>> = (0..).zip(shape).map(|(seed, bytes)| words(ROWS * bytes, seed)).collect();
    tensors.iter_mut().zip(&hosts).for_each(|(tensor, host)| gpu.fill_rows(tensor, host).unwrap());
    let segments = pack_segments(gpu, &tensors.iter_mut().collect::<Vec<_>>(), most).unwrap();
    // Two rows at once.
    let (from, to) = ([3usize, 0], [1usize, 4]);
    let row_of = |row: usize| -> Vec<u8> {
        hosts.iter().zip(shape).flat_map(|(host, bytes)| &host[row * bytes..][..*bytes]).copied().collect()
    };
    let expected = from.map(row_of);
    let checksums = expected.each_ref().map(|bytes| {
        let mut checksum = Checksum::default();
        checksum.add(bytes);
        checksum.sum()
    });
    let mut packed = gpu.tensor("packed", &[2 * most.max(32 << 10)], DType::U8).unwrap();
    let words = HostWords::new(gpu.gpu().unwrap(), 20).unwrap();
    let [there, back] = [from, to].map(|rows| numbers(gpu, &rows));
    let (mut sums, mut bytes) = ([[0u64; 2]; 4], [Vec::new(), Vec::new()]);
    for segment in &segments {
        pack_rows(gpu, segment, PackedRows { rows: &there, count: 2, sums: (&words, 4) }, &mut packed).unwrap();
        let all = contents(gpu, &packed);
        (0..2).for_each(|i| bytes[i].extend_from_slice(&all[i * segment.bytes..][..segment.bytes]));
        unpack_rows(gpu, segment, PackedRows { rows: &back, count: 2, sums: (&words, 12) }, &mut packed).unwrap();
        gpu.synchronize().unwrap();
        for (i, sums) in sums.iter_mut().enumerate() {
            for (half, sum) in sums.iter_mut().enumerate() {
                let word = 4 + 4 * i + 2 * half;
                *sum = sum.wrapping_add(u64::from(words.load(word)) | u64::from(words.load(word + 1)) << 32);
            }
        }
    }
    for (host, bytes) in hosts.iter_mut().zip(shape) {
        (0..2).for_each(|i| host.copy_within(from[i] * bytes..(from[i] + 1) * bytes, to[i] * bytes));
    }
    let same = tensors.iter().zip(&hosts).all(|(tensor, host)| contents(gpu, tensor) == *host);
    let right = sums.iter().enumerate().all(|(i, sums)| Checksum::of_sums(*sums) == checksums[i % 2]);
    same && right && bytes == expected
}

fn numbers(gpu: &mut Exec, rows: &[usize]) -> Tensor {
    let mut tensor = gpu.tensor("numbers", &[rows.len()], DType::U32).unwrap();
    gpu.fill_rows(&mut tensor, &rows.iter().map(|row| *row as u32).collect::<Vec<_>>()).unwrap();
    tensor
}

/// Prints the time of a block of Qwen3-4B.
fn time(gpu: &mut Exec) {
    let mut tensors = tensors(gpu, SHAPES[0]);
    let segments: Vec<PackSegment> = pack_segments(gpu, &tensors.iter_mut().collect::<Vec<_>>(), 8 << 20).unwrap();
    let mut packed = gpu.tensor("packed", &[8 << 20], DType::U8).unwrap();
    let words = HostWords::new(gpu.gpu().unwrap(), 16).unwrap();
    let numbers = numbers(gpu, &[0, 1, 2]);
    let segment = &segments[0];
    for count in [1, 3] {
        let rows = PackedRows { rows: &numbers, count, sums: (&words, 4) };
        let pack = 1e6 * seconds(gpu, |gpu| pack_rows(gpu, segment, rows, &mut packed).unwrap());
        let unpack = 1e6 * seconds(gpu, |gpu| unpack_rows(gpu, segment, rows, &mut packed).unwrap());
        println!("{count} blocks of {} bytes: pack {pack:.1} us, unpack {unpack:.1} us", segment.bytes);
    }
}
