//! Ranks with nothing but a communicator, and what they exchange.

use super::add_norm::Operands;
use half::bf16;
use pegainfer_core::cuda::{Cuda, Graph};
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{Communicator, Ranks};
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::cuda::images;
use pegainfer_kernels::parallel::{Algorithm, Nccl, Peers};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the longest message: more than one launch holds.
pub const MOST_BYTES: usize = 84 << 20;
/// Bytes of a vector, in which messages are counted.
pub const VECTOR: usize = 16;

pub struct Rank {
    pub rank: usize,
    pub exec: Exec,
    pub peers: Arc<Peers>,
    pub nccl: Option<Nccl>,
    /// `[vectors, 4]` f32.
    pub x: Tensor,
    /// `[vectors, 8]` bf16.
    pub half: Tensor,
    /// A rank's columns and those of all.
    pub columns: Option<(Tensor, Tensor)>,
    pub add_norm: Option<Operands>,
    pub graph: Option<Graph>,
}

/// How a sum is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum By {
    /// What the communicator chooses.
    Size,
    Algorithm(Algorithm),
    Nccl,
}

pub const OURS: [By; 4] = [
    By::Size,
    By::Algorithm(Algorithm::LowLatency),
    By::Algorithm(Algorithm::OneShot),
    By::Algorithm(Algorithm::TwoShot),
];

impl Rank {
    pub fn all_reduce(&mut self, by: By, dtype: DType) -> Result<(), OpError> {
        let x = if dtype == DType::F32 { &mut self.x } else { &mut self.half };
        match by {
            By::Size => self.peers.all_reduce(&mut self.exec, x),
            By::Algorithm(algorithm) => self.peers.all_reduce_by(algorithm, &mut self.exec, x),
            By::Nccl => self.nccl.as_ref().unwrap().all_reduce(&mut self.exec, x),
        }
    }
}

/// As many ranks, each on a GPU of its own.
pub fn start(count: usize, timeout: Duration, with_nccl: bool) -> Ranks<Rank> {
    let mut execs: Vec<Exec> = (0..count).map(|rank| Exec::cuda(rank, Some(2)).unwrap()).collect();
    let mut opened: Vec<&mut Cuda> = execs.iter_mut().map(|exec| exec.gpu().unwrap()).collect();
    opened.iter_mut().for_each(|gpu| gpu.preload(images::ALL).unwrap());
    let opened: Vec<&Cuda> = opened.iter().map(|gpu| &**gpu).collect();
    let peers = Peers::connect(&opened, timeout).unwrap();
    let nccl = match with_nccl {
        true => Nccl::connect(&opened).inspect_err(|why| println!("{{\"nccl\":{:?}}}", why.message)).ok(),
        false => None,
    };
    let mut nccl: Vec<Option<Nccl>> = match nccl {
        Some(ends) => ends.into_iter().map(Some).collect(),
        None => (0..count).map(|_| None).collect(),
    };
    let rank = |(rank, (mut exec, peers)): (usize, (Exec, Peers))| {
        let peers = Arc::new(peers);
        let x = exec.tensor("x", &[MOST_BYTES / VECTOR, 4], DType::F32).unwrap();
        let half = exec.tensor("half", &[MOST_BYTES / VECTOR, 8], DType::Bf16).unwrap();
        let nccl = nccl[rank].take();
        let state =
            Rank { rank, exec, peers: peers.clone(), nccl, x, half, columns: None, add_norm: None, graph: None };
        (state, peers as Arc<dyn Communicator>)
    };
    Ranks::new(execs.into_iter().zip(peers).enumerate().map(rank).collect()).unwrap()
}

/// Runs `job` on every rank. Nothing may be allocated on one rank while another waits for it in an exchange, so a job does either.
pub fn run(
    ranks: &mut Ranks<Rank>,
    what: impl std::fmt::Display,
    job: impl Fn(&mut Rank) -> Result<(), OpError> + Send + Sync + 'static,
) {
    let bound = move |rank: &mut Rank| {
        rank.exec.gpu()?.bind()?;
        job(rank)
    };
    let count = ranks.count();
    ranks.run(bound).unwrap_or_else(|e| panic!("{count} ranks, {what}: {e}"));
}

/// What a rank brings: numbers of many magnitudes, whose sum depends on the order.
pub fn part(rank: usize, elements: usize) -> Vec<f32> {
    let value = |i: usize| {
        let bits = rng::bits(rank as u64 + 1, i as u64);
        let mantissa = (bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        mantissa * (1 << (bits % 12)) as f32
    };
    (0..elements).map(value).collect()
}

pub fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|v| bf16::from_f32(*v)).collect()
}

/// The sum over the ranks, in their order.
pub fn sum(ranks: usize, of_rank: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let mut sum = of_rank(0);
    for rank in 1..ranks {
        sum.iter_mut().zip(of_rank(rank)).for_each(|(sum, x)| *sum += x);
    }
    sum
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Equal in bits, or where the first difference is.
pub fn equal(got: &[u32], expected: &[u32]) -> Result<(), OpError> {
    let different = got.iter().zip(expected).enumerate().filter(|(_, (g, e))| g != e);
    let message = match different.clone().next() {
        None => return Ok(()),
        Some((i, (g, e))) => format!(
            "{} of {} are wrong, the first is element {i}: {} ({g:#x}), not {} ({e:#x})",
            different.count(),
            got.len(),
            f32::from_bits(*g),
            f32::from_bits(*e)
        ),
    };
    Err(OpError { op: "compare", message })
}
