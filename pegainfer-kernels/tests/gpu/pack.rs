//! Rows of several tensors packed by a GPU, and back: bytes and checksum as the host has them, and the time of a block.

use super::seconds;
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::tiers::Checksum;
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::cuda;
use pegainfer_kernels::ops::{PackPiece, pack_pieces, pack_rows, unpack_rows};

const ROWS: usize = 5;
/// Bytes of a row of each tensor: some whole vectors, some not, some of several parts.
const SHAPES: [&[usize]; 4] = [&[32 << 10; 72], &[20, 65_552, 4, 48], &[100_000], &[16, 16]];
/// Most bytes of a piece.
const MOST: [usize; 3] = [1, 70_000, 8 << 20];

/// Compares and times. Returns whether everything agreed.
pub fn run() -> bool {
    let mut gpu = cuda::open(0, None).unwrap();
    let mut good = true;
    for (shape, most) in SHAPES.into_iter().flat_map(|shape| MOST.map(|most| (shape, most))) {
        let agrees = agrees(&mut gpu, shape, most);
        println!("{} tensors, pieces of at most {most} bytes: {}", shape.len(), if agrees { "ok" } else { "DIFFERENT" });
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
    let pieces = pack_pieces(gpu, &tensors.iter_mut().collect::<Vec<_>>(), most).unwrap();
    let (from, to) = (3, 1);
    let expected: Vec<u8> =
        hosts.iter().zip(shape).flat_map(|(host, bytes)| &host[from * bytes..][..*bytes]).copied().collect();
    let mut checksum = Checksum::default();
    checksum.add(&expected);
    let mut packed = gpu.tensor("packed", &[most.max(32 << 10)], DType::U8).unwrap();
    let mut sums = gpu.tensor("sums", &[4], DType::U32).unwrap();
    let (mut there, mut back, mut bytes) = ([0u64; 2], [0u64; 2], Vec::new());
    for piece in &pieces {
        pack_rows(gpu, piece, from, &mut packed, &mut sums).unwrap();
        add(gpu, &sums, &mut there);
        bytes.extend_from_slice(&contents(gpu, &packed)[..piece.bytes]);
        unpack_rows(gpu, piece, to, &mut packed, &mut sums).unwrap();
        add(gpu, &sums, &mut back);
    }
    for (host, bytes) in hosts.iter_mut().zip(shape) {
        host.copy_within(from * bytes..(from + 1) * bytes, to * bytes);
    }
    let same = tensors.iter().zip(&hosts).all(|(tensor, host)| contents(gpu, tensor) == *host);
    same && bytes == expected && [there, back].iter().all(|sums| Checksum::of_sums(*sums) == checksum.sum())
}

fn add(gpu: &Exec, sums: &Tensor, to: &mut [u64; 2]) {
    let mut halves = [0u32; 4];
    gpu.read(sums, 0, &mut halves).unwrap();
    let [a, b, c, d] = halves.map(u64::from);
    *to = [to[0].wrapping_add(a | b << 32), to[1].wrapping_add(c | d << 32)];
}

/// Prints the time of a block of Qwen3-4B.
fn time(gpu: &mut Exec) {
    let mut tensors = tensors(gpu, SHAPES[0]);
    let pieces: Vec<PackPiece> = pack_pieces(gpu, &tensors.iter_mut().collect::<Vec<_>>(), 8 << 20).unwrap();
    let mut packed = gpu.tensor("packed", &[8 << 20], DType::U8).unwrap();
    let mut sums = gpu.tensor("sums", &[4], DType::U32).unwrap();
    let piece = &pieces[0];
    let pack = 1e6 * seconds(gpu, |gpu| pack_rows(gpu, piece, 3, &mut packed, &mut sums).unwrap());
    let unpack = 1e6 * seconds(gpu, |gpu| unpack_rows(gpu, piece, 3, &mut packed, &mut sums).unwrap());
    println!("a block of {} bytes: pack {pack:.1} us, unpack {unpack:.1} us", piece.bytes);
}
