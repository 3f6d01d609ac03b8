//! Operands are small whole numbers, so sums are exact in f32, and every element must be the exact value rounded once,
//! or twice if it is added to bf16.

use super::{blaslt, m_bucket, matmul};
use cudarc::driver::sys;
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, Tensor};

/// A GEMM with whole numbers as initial output, and its expected results with and without accumulation.
struct Case {
    x: Tensor,
    w: Tensor,
    out: Tensor,
    before: Vec<f32>,
    gemm: Vec<f32>,
}

impl Case {
    fn new(exec: &mut Exec, m: usize, n: usize, k: usize, dtype: DType) -> Self {
        let whole = |seed: u64, i: usize| (rng::bits(seed, i as u64) % 5) as f32 - 2.0;
        let mut bf16_tensor = |name: &str, rows: usize, cols: usize, seed: u64| {
            let mut tensor = exec.tensor(name, &[rows, cols], DType::Bf16).unwrap();
            let fill = |first: usize, chunk: &mut [bf16]| {
                chunk.iter_mut().enumerate().for_each(|(i, v)| *v = bf16::from_f32(whole(seed, first + i)));
            };
            exec.write(&mut tensor, 0..rows * cols, fill).unwrap();
            tensor
        };
        let (x, w) = (bf16_tensor("x", m, k, 1), bf16_tensor("w", n, k, 2));
        let before = (0..m * n).map(|i| whole(3, i)).collect();
        let dot = |i: usize| (0..k).map(|j| whole(1, i / n * k + j) * whole(2, i % n * k + j)).sum::<f32>();
        let gemm = (0..m * n).map(dot).collect();
        let out = exec.tensor("out", &[m, n], dtype).unwrap();
        Self { x, w, out, before, gemm }
    }

    fn reset(&mut self, exec: &mut Exec) {
        let before = &self.before;
        let all = 0..before.len();
        match self.out.dtype() {
            DType::F32 => exec.write(&mut self.out, all, |first, chunk: &mut [f32]| {
                chunk.copy_from_slice(&before[first..][..chunk.len()]);
            }),
            _ => exec.write(&mut self.out, all, |first, chunk: &mut [bf16]| {
                chunk.iter_mut().zip(&before[first..]).for_each(|(to, from)| *to = bf16::from_f32(*from));
            }),
        }
        .unwrap();
    }

    fn run(&mut self, exec: &mut Exec, accumulate: bool) {
        matmul(exec, "test", &self.x, &self.w, accumulate, &mut self.out).unwrap();
    }

    fn check(&self, exec: &Exec, accumulate: bool) {
        let rounded = |v: f32| if self.out.dtype() == DType::F32 { v } else { bf16::from_f32(v).to_f32() };
        let expected = self.gemm.iter().zip(&self.before).map(|(p, b)| match accumulate {
            true => [rounded(p + b), rounded(rounded(*p) + b)],
            false => [rounded(*p); 2],
        });
        let got: Vec<f32> = match self.out.dtype() {
            DType::F32 => {
                let mut got = vec![0f32; self.before.len()];
                exec.read(&self.out, 0, &mut got).unwrap();
                got
            }
            _ => {
                let mut got = vec![bf16::ZERO; self.before.len()];
                exec.read(&self.out, 0, &mut got).unwrap();
                got.iter().map(|v| v.to_f32()).collect()
            }
        };
        let differ = |(i, (e, g)): (usize, ([f32; 2], &f32))| {
            (!e.contains(g)).then(|| format!("element {i}: {g}, not {}", e[0]))
        };
        let wrong: Vec<String> = expected.zip(&got).enumerate().filter_map(differ).collect();
        let (shape, n) = (self.out.shape(), wrong.len());
        assert!(n == 0, "{shape:?}, accumulate {accumulate}: {n} wrong, {:?}", &wrong[..n.min(3)]);
    }
}

#[test]
fn few_algorithms_serve_all_row_counts() {
    assert_eq!([1, 17, 97, 128].map(m_bucket), [16, 32, 112, 128]);
    assert_eq!([129, 200, 256, 257, 500, 513, 131_072].map(m_bucket), [144, 208, 256, 288, 512, 576, 131_072]);
}

#[test]
#[ignore = "needs a GPU"]
fn gemms_are_exact_on_ragged_shapes() {
    let mut exec = Exec::cuda(0, Some(2)).unwrap();
    println!("cuBLASLt {}", blaslt(&mut exec).unwrap());
    for (m, n, k) in [(1, 8, 8), (33, 72, 64), (48, 64, 1000), (130, 264, 320), (192, 2560, 64), (300, 128, 2560)] {
        for dtype in [DType::Bf16, DType::F32] {
            let mut case = Case::new(&mut exec, m, n, k, dtype);
            for accumulate in [false, true] {
                case.reset(&mut exec);
                case.run(&mut exec, accumulate);
                case.check(&exec, accumulate);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_new_product_can_be_captured() {
    let mut exec = Exec::cuda(0, Some(2)).unwrap();
    let mut case = Case::new(&mut exec, 64, 392, 136, DType::Bf16);
    let stream = exec.gpu().unwrap().stream().clone();
    blaslt(&mut exec).unwrap();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    case.run(&mut exec, true);
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    for _ in 0..2 {
        case.reset(&mut exec);
        graph.launch().unwrap();
        case.check(&exec, true);
    }
}

/// GEMMs that depend on each other across streams.
struct Branches {
    w: [Tensor; 2],
    x: Tensor,
    /// Outputs on the main stream, on both side streams, and on the main stream concurrently with them and after them.
    out: [Tensor; 6],
}

impl Branches {
    const ROWS: usize = 200;
    const WIDTH: usize = 2048;

    fn new(exec: &mut Exec) -> Self {
        let case = |exec: &mut Exec, rows| Case::new(exec, rows, 8, Self::WIDTH, DType::Bf16).x;
        let (x, w) = (case(exec, Self::ROWS), [(); 2].map(|()| case(exec, Self::WIDTH)));
        let out = [(); 6].map(|()| exec.tensor("out", &[Self::ROWS, Self::WIDTH], DType::Bf16).unwrap());
        Self { w, x, out }
    }

    fn run(&mut self, exec: &mut Exec) {
        let Self { w: [a, b], x, out: [first, left, right, middle, end, last] } = self;
        let gemm = |exec: &mut Exec, x: &Tensor, w: &Tensor, out: &mut Tensor| matmul(exec, "test", x, w, false, out);
        gemm(exec, x, a, first).unwrap();
        exec.on_side_stream(0, |exec| gemm(exec, first, a, left)).unwrap();
        exec.on_side_stream(1, |exec| gemm(exec, first, b, right)).unwrap();
        gemm(exec, x, b, middle).unwrap();
        exec.join_side_streams().unwrap();
        gemm(exec, left, b, end).unwrap();
        gemm(exec, right, a, last).unwrap();
    }

    /// Returns the outputs and clears them.
    fn take(&mut self, exec: &mut Exec) -> Vec<bf16> {
        let of = |out: &mut Tensor| {
            let mut values = vec![bf16::ZERO; out.elements()];
            exec.read(out, 0, &mut values).unwrap();
            exec.clear(out).unwrap();
            values
        };
        self.out.iter_mut().flat_map(of).collect()
    }
}

#[test]
#[ignore = "needs a GPU"]
fn side_streams_give_what_one_stream_gives() {
    let mut exec = Exec::cuda(0, Some(2)).unwrap();
    blaslt(&mut exec).unwrap();
    let mut branches = Branches::new(&mut exec);
    branches.run(&mut exec);
    let in_order = branches.take(&mut exec);
    assert!(in_order.chunks(in_order.len() / 6).all(|out| out.iter().any(|v| *v != bf16::ZERO)));
    exec.open_side_streams(2).unwrap();
    for _ in 0..10 {
        branches.run(&mut exec);
        assert!(branches.take(&mut exec) == in_order, "launched one by one");
    }
    exec.begin_capture().unwrap();
    branches.run(&mut exec);
    let graph = exec.end_capture().unwrap();
    for _ in 0..10 {
        exec.replay(&graph).unwrap();
        assert!(branches.take(&mut exec) == in_order, "in a graph");
    }
}
