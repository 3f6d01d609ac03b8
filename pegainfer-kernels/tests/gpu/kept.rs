//! A GPU that stays open between its users: what was attached to it is still there, and kernels give the same bytes.

use pegainfer_core::exec::{Exec, keep_gpus_open};
use pegainfer_core::tensor::DType;
use pegainfer_kernels::{cuda, ops};

/// Engines that come and go.
const ROUNDS: usize = 20;

/// What the first user attaches.
struct Marker(usize);

/// Compares, and prints the memory. Returns whether everything agreed.
pub fn run() -> bool {
    keep_gpus_open();
    let mut first = cuda::open(0, None).unwrap();
    first.attach(Marker(7));
    let expected = gemm(&mut first);
    drop(first);
    let mut free = Vec::new();
    let good = (0..ROUNDS).all(|_| {
        // The second one is closed when both have gone, with its kernels; the context stays.
        let (mut kept, mut second) = (cuda::open(0, None).unwrap(), cuda::open(0, None).unwrap());
        let is_kept = kept.attached(|_| Marker(0)).0 == 7;
        let agree = [&mut kept, &mut second].map(|exec| gemm(exec) == expected);
        free.push(kept.gpu().unwrap().info().unwrap().free);
        drop(kept);
        drop(second);
        is_kept && agree == [true; 2]
    });
    let lost = free.first().zip(free.last()).map_or(0, |(first, last)| first.saturating_sub(*last));
    println!("a kept GPU: {}, {lost} bytes less free after {ROUNDS} rounds", if good { "ok" } else { "DIFFERENT" });
    good && lost < 4 << 20
}

/// A small GEMM of a library, after kernels of this crate.
fn gemm(exec: &mut Exec) -> Vec<u8> {
    let [mut x, mut w] =
        [("x", 300), ("w", 512)].map(|(name, rows)| exec.tensor(name, &[rows, 256], DType::Bf16).unwrap());
    for (seed, tensor) in (0..).zip([&mut x, &mut w]) {
        ops::uniform(exec, seed, 0.02, tensor).unwrap();
    }
    let mut out = exec.tensor("out", &[300, 512], DType::Bf16).unwrap();
    ops::linear(exec, &x, &w, &mut out).unwrap();
    let mut bytes = vec![0; out.bytes() as usize];
    exec.read_bytes(&out, &mut bytes).unwrap();
    bytes
}
