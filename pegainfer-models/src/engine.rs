//! Loads the engine of a checkpoint's family.

mod data_parallel;
#[cfg(feature = "deepseek-v4")]
pub mod deepseek_v4;
pub mod family;

use crate::args::{DeviceArg, EngineArgs};
use crate::detect;
use anyhow::{Context, Result, anyhow, bail, ensure};
use family::{Family, LoadedEngine, MeasureProgress, OpenDevice, UniformStep};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::ledger::{Header, Remeasured, Selection, StepLine};
use pegainfer_core::parallel::fewest_ranks;
use pegainfer_core::record::OpRecord;
use pegainfer_kernels::cuda;
use pegainfer_runtime::{GpuFit, Measured, Overrides};
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::path::Path;

/// Maximum number of CPU threads per core.
const MAX_THREADS_PER_CORE: usize = 16;

/// Loads the checkpoint in `dir` and starts its engine, or as many engines as the flags set.
pub fn load(dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    let family = detect::detect(dir)?;
    data_parallel::load(family, open_devices(family, dir, args)?, dir, args)
}

/// Loads the checkpoint in `dir` and measures its steps.
pub fn measure(
    dir: &Path,
    args: &EngineArgs,
    selection: Selection<'_>,
    progress: MeasureProgress<'_>,
) -> Result<Measured> {
    let family = detect::detect(dir)?;
    ensure!(args.speculative_config.is_none(), "--speculative-config: a ledger is measured without drafts");
    let device = open_measured_device(family, dir, args)?;
    let ranks = ranks(&device, args);
    let mut measured = (family.measure)(device, dir, args, (selection, progress))?;
    measured.header.ranks = ranks;
    Ok(measured)
}

/// Loads the checkpoint in `dir` and measures `steps` of a ledger again. Also returns the engine's properties.
pub fn measure_again(
    dir: &Path,
    args: &EngineArgs,
    steps: &[StepLine],
    progress: MeasureProgress<'_>,
) -> Result<(Header, Vec<Remeasured>)> {
    let family = detect::detect(dir)?;
    ensure!(args.speculative_config.is_none(), "--speculative-config: a ledger is measured without drafts");
    let device = open_measured_device(family, dir, args)?;
    let ranks = ranks(&device, args);
    let (header, again) = (family.measure_again)(device, dir, args, (steps, progress))?;
    Ok((Header { ranks, ..header }, again))
}

/// Number of ranks of an engine on this device. With `--loop-back-ranks`, one rank stands for all.
fn ranks(device: &OpenDevice, args: &EngineArgs) -> usize {
    args.loop_back_ranks.map_or(device.execs.len(), Into::into)
}

/// Bytes of weights that a decode step of the model in `dir` reads, with `overrides`.
pub fn weight_bytes(dir: &Path, overrides: &Overrides) -> Result<u64> {
    (detect::detect(dir)?.weight_bytes)(dir, overrides)
}

/// Size of the vocabulary: token ids are smaller.
pub fn vocab_size(dir: &Path) -> Result<usize> {
    (detect::detect(dir)?.vocab_size)(dir)
}

/// The ops of one step of the model in `dir`, with `overrides`: `batch` rows of `context` tokens, the last `tokens` of
/// them new.
pub fn record(dir: &Path, overrides: &Overrides, batch: usize, tokens: usize, context: usize) -> Result<Vec<OpRecord>> {
    record_rank(dir, overrides, 1, (batch, tokens, context))
}

/// Like [`record`], on rank 0 of `ranks`.
pub fn record_rank(dir: &Path, overrides: &Overrides, ranks: usize, step: UniformStep) -> Result<Vec<OpRecord>> {
    let family = detect::detect(dir)?;
    (family.record)(dir, overrides, ranks, step)
}

/// Capacity of an engine for the model in `dir` on a GPU with `bytes` bytes, which this machine need not have.
pub fn gpu_fit(dir: &Path, args: &EngineArgs, bytes: u64) -> Result<GpuFit> {
    (detect::detect(dir)?.fit)(dir, args, Some(bytes))
}

/// Capacity of an engine for the model in `dir` on this machine's CPU.
pub fn cpu_fit(dir: &Path, args: &EngineArgs) -> Result<GpuFit> {
    (detect::detect(dir)?.fit)(dir, args, None)
}

/// Bytes that the engines of the model in `dir` take with these flags, on all devices together: weights, KV cache, state
/// and a step.
pub fn memory(dir: &Path, args: &EngineArgs) -> Result<u64> {
    let (family, engines) = (detect::detect(dir)?, args.data_parallel_size.get() as u64);
    let Some(gpus) = chosen_gpus(&args.device)? else { return Ok((family.fit)(dir, args, None)?.used() * engines) };
    let total = pegainfer_core::cuda::device_memory(gpus[0]).context("the memory of a GPU is unknown")?;
    let ranks = args.tensor_parallel_size.or(args.loop_back_ranks).map_or(1, usize::from) as u64;
    Ok((family.fit)(dir, args, Some(total))?.used() * ranks * engines)
}

/// The device of a ledger.
fn open_measured_device(family: &Family, dir: &Path, args: &EngineArgs) -> Result<OpenDevice> {
    ensure!(args.data_parallel_size.get() == 1, "--data-parallel-size: a ledger is measured on one engine");
    open_device(family, dir, args)
}

/// The device of the first engine set by the flags for the model in `dir`, or one device per rank.
pub fn open_device(family: &Family, dir: &Path, args: &EngineArgs) -> Result<OpenDevice> {
    let args = EngineArgs { data_parallel_size: NonZeroUsize::MIN, ..args.clone() };
    open_devices(family, dir, &args)?.pop().context("no device is open")
}

/// The devices of each engine set by the flags for the model in `dir`.
fn open_devices(family: &Family, dir: &Path, args: &EngineArgs) -> Result<Vec<OpenDevice>> {
    let Some(gpus) = chosen_gpus(&args.device)? else { return open_cpu(args) };
    let sizes = (args.data_parallel_size.get(), args.tensor_parallel_size);
    let mut devices = data_parallel::open_gpus(&gpus, sizes, |gpus, ranks| {
        open_gpus(gpus, (family, dir, &EngineArgs { tensor_parallel_size: ranks, ..args.clone() }))
    })?;
    if devices.len() > 1 {
        data_parallel::check_same_cards(&mut devices)?;
    }
    Ok(devices)
}

/// The GPUs that `--device` allows, in order; `None` for the CPU.
pub(crate) fn chosen_gpus(device: &DeviceArg) -> Result<Option<Vec<usize>>> {
    Ok(match (device, cuda::available()) {
        (DeviceArg::Cuda(_) | DeviceArg::Gpus(_), Err(why)) => bail!("--device cuda: {why}; use --device cpu"),
        (DeviceArg::Cuda(first), Ok(count)) => {
            Some(listed_gpus(&(*first..count.max(first + 1)).collect::<Vec<_>>(), count)?)
        }
        (DeviceArg::Gpus(gpus), Ok(count)) => Some(listed_gpus(gpus, count)?),
        (DeviceArg::Auto, Ok(count)) => Some((0..count).collect()),
        (DeviceArg::Auto, Err(why)) => {
            log::debug!("running on the CPU: {why}");
            None
        }
        (DeviceArg::Cpu, _) => None,
    })
}

/// The GPUs of `--device` on a machine with `count` GPUs.
fn listed_gpus(gpus: &[usize], count: usize) -> Result<Vec<usize>> {
    if let Some(ordinal) = gpus.iter().find(|ordinal| **ordinal >= count) {
        bail!("--device cuda:{ordinal}: GPUs are counted from 0, and this machine has {count}");
    }
    Ok(gpus.to_vec())
}

/// The CPU, whose threads all ranks of all engines share.
fn open_cpu(args: &EngineArgs) -> Result<Vec<OpenDevice>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (engines, ranks) = (args.data_parallel_size.get(), args.tensor_parallel_size.map_or(1, Into::into));
    check_threads(args.threads.map_or(0, Into::into))?;
    let isa = Isa::best();
    let threads = (args.threads.map_or(cores, Into::into) / (engines * ranks)).max(1);
    let plural = if threads == 1 { "" } else { "s" };
    let shared = if ranks == 1 { String::new() } else { format!("{ranks} ranks of ") };
    let name = format!("cpu ({}, {shared}{threads} thread{plural})", isa.name());
    let open = |_| {
        let execs: std::io::Result<Vec<_>> = (0..ranks).map(|_| Exec::cpu(isa, Some(threads))).collect();
        let mut execs = execs.context("the CPU threads cannot be started")?;
        execs.iter_mut().for_each(|exec| exec.set_activations(args.overrides().activations));
        Ok(OpenDevice { execs, name: name.clone(), shows_progress: true })
    };
    (0..engines).map(open).collect()
}

/// Refuses more threads than could run: the pool would not even start in a reasonable time.
fn check_threads(threads: usize) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let max_threads = MAX_THREADS_PER_CORE * cores;
    ensure!(threads <= max_threads, "--threads {threads}: this process has {cores} cores; give at most {max_threads}");
    Ok(())
}

/// One GPU per rank, the first of `gpus`: as many as the flags set, or the fewest that hold the model.
fn open_gpus(gpus: &[usize], (family, dir, args): (&Family, &Path, &EngineArgs)) -> Result<OpenDevice> {
    let (first, left) = (gpus[0], gpus.len());
    // A model of one device says itself how it fits.
    let chooses =
        args.tensor_parallel_size.is_none() && args.loop_back_ranks.is_none() && (left > 1 || !family.fits_one);
    let needs = if chooses { (family.rank_bytes)(dir, args)? } else { Vec::new() };
    let ranks: usize = args.tensor_parallel_size.map_or(1, Into::into);
    ensure!(ranks <= left, "--tensor-parallel-size {ranks}: this machine has {left} GPUs from cuda:{first} on");
    check_threads(args.threads.map_or(0, Into::into))?;
    let mut execs = open_each(&gpus[..ranks], args)?;
    if let [smallest, .., largest] = &needs[..] {
        // Most models fit one GPU, and another one takes a few tenths of a second to open.
        if smallest.ranks > 1 || smallest.bytes > free_bytes(&mut execs, args)?[0] {
            execs.extend(open_each(&gpus[1..largest.ranks.min(left)], args)?);
            let ranks =
                fewest_ranks(&needs, &free_bytes(&mut execs, args)?).map_err(|why| anyhow!("{family}: {why}"))?;
            execs.truncate(ranks);
        }
    }
    let names = execs.iter_mut().map(|exec| Ok(exec.gpu()?.info()?.name)).collect::<Result<Vec<String>>>()?;
    if let Some(other) = names.iter().position(|name| *name != names[0]) {
        let (own, other, name) = (&names[0], gpus[other], &names[other]);
        bail!(
            "cuda:{first} is {own} and cuda:{other} is {name}: GPUs of different kinds cannot share a model; choose others with --device"
        );
    }
    let name = data_parallel::device_name(&gpus[..execs.len()], &names[0]);
    Ok(OpenDevice { execs, name, shows_progress: true })
}

/// Opens GPUs, all at the same time: creating a context takes a few tenths of a second.
fn open_each(ordinals: &[usize], args: &EngineArgs) -> Result<Vec<Exec>> {
    let open = |ordinal| {
        let opened = cuda::open(ordinal, args.threads.map(Into::into));
        let mut exec = opened.with_context(|| format!("GPU {ordinal} cannot be used; try --device cpu"))?;
        exec.set_activations(args.overrides().activations);
        Ok(exec)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = ordinals.iter().map(|ordinal| scope.spawn(move || open(*ordinal))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// Free memory of each GPU, within `--gpu-memory-limit`.
fn free_bytes(execs: &mut [Exec], args: &EngineArgs) -> Result<Vec<u64>> {
    let limit = args.gpu_memory_limit.unwrap_or(u64::MAX);
    execs.iter_mut().map(|exec| Ok((exec.gpu()?.info()?.free as u64).min(limit))).collect()
}
