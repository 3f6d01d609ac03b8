//! `--data-parallel-size`: several engines of one model behind one handle, each on its own devices.

use super::family::{Family, LoadedEngine, OpenDevice};
use crate::args::EngineArgs;
use anyhow::{Context, Result, ensure};
use pegainfer_core::engine::EngineHandle;
use pegainfer_core::exec::{Device, Exec};
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Loads an engine on each of the devices and joins them. On GPUs they load at the same time, and the checkpoint is
/// read once, because all but one find it in the page cache. On the CPU they load one after the other.
pub fn load(family: &Family, devices: Vec<OpenDevice>, dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    let engines = devices.len();
    if let Some(lost) = args.lose_engine {
        ensure!(lost.engine < engines, "--lose-engine {}: engines are counted from 0 to {}", lost.engine, engines - 1);
    }
    let load = |(engine, device): (usize, OpenDevice)| {
        if engines > 1 {
            log::info!("engine {engine} of {engines} runs on {}", device.name);
        }
        let lose_engine = args.lose_engine.filter(|lost| lost.engine == engine);
        let kv_disk = args.kv_disk.as_ref().map(|disk| kv_file(disk, (engine, engines)));
        let loaded = (family.load)(device, dir, &EngineArgs { lose_engine, kv_disk, ..args.clone() });
        if engines > 1 { loaded.with_context(|| format!("engine {engine} cannot be loaded")) } else { loaded }
    };
    let started = Instant::now();
    let on_gpus = devices.iter().flat_map(|device| &device.execs).all(|exec| exec.device() == Device::Cuda);
    let numbered = devices.into_iter().enumerate().map(|(engine, device)| {
        let shows_progress = engine == 0 || !on_gpus;
        (engine, OpenDevice { shows_progress, ..device })
    });
    let loaded: Result<Vec<LoadedEngine>> = if on_gpus {
        std::thread::scope(|scope| {
            let threads: Vec<_> = numbered.map(|device| scope.spawn(|| load(device))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        })
    } else {
        numbered.map(load).collect()
    };
    let time = started.elapsed();
    join(loaded?).map(|loaded| if engines == 1 { loaded } else { LoadedEngine { weights_time: time, ..loaded } })
}

/// The file of one of several engines, and its share of the size.
fn kv_file((path, bytes): &(PathBuf, u64), (engine, engines): (usize, usize)) -> (PathBuf, u64) {
    let mut path = path.clone();
    if engine > 0 {
        path.as_mut_os_string().push(format!(".{engine}"));
    }
    (path, bytes / engines as u64)
}

/// One loaded engine of several: their handles joined, their bytes added.
fn join(mut engines: Vec<LoadedEngine>) -> Result<LoadedEngine> {
    if engines.len() == 1 {
        return engines.pop().context("no engine is loaded");
    }
    let (weight_bytes, kv_bytes) =
        engines.iter().fold((0, 0), |sum, one| (sum.0 + one.weight_bytes, sum.1 + one.kv_bytes));
    let first = engines.first_mut().context("no engine is loaded")?;
    // All engines have the same model, so the adapters of one serve all.
    let adapters = first.adapters.take();
    let (family, device, ranks, weights_time) = (first.family, first.device.clone(), first.ranks, first.weights_time);
    let handle = EngineHandle::join(engines.into_iter().map(|engine| engine.handle).collect());
    Ok(LoadedEngine { handle, family, device, ranks, weight_bytes, weights_time, kv_bytes, adapters })
}

/// Opens the GPUs of `engines` engines of `ranks` ranks, in the order of `gpus`. `open` opens some of the given GPUs for
/// one engine: the given number of them, or as many as it needs. All engines have as many as the first.
pub fn open_gpus(
    gpus: &[usize],
    (engines, ranks): (usize, Option<NonZeroUsize>),
    open: impl Fn(&[usize], Option<NonZeroUsize>) -> Result<OpenDevice>,
) -> Result<Vec<OpenDevice>> {
    let first = gpus.first().context("--device has no GPU")?;
    let needed = engines * ranks.map_or(1, usize::from);
    ensure!(
        engines == 1 || needed <= gpus.len(),
        "--data-parallel-size {engines}: the engines need {needed} GPUs, and this machine has {} from cuda:{first} on",
        gpus.len()
    );
    let mut devices = vec![open(&gpus[..gpus.len() / engines], ranks)?];
    let ranks = devices[0].execs.len();
    for engine in 1..engines {
        devices.push(open(&gpus[engine * ranks..(engine + 1) * ranks], NonZeroUsize::new(ranks))?);
    }
    Ok(devices)
}

/// Refuses GPUs of different kinds: the engines could not stand for each other.
pub fn check_same_cards(devices: &mut [OpenDevice]) -> Result<()> {
    let mut first: Option<String> = None;
    for exec in devices.iter_mut().flat_map(|device: &mut OpenDevice| &mut device.execs) {
        let card = card(exec)?;
        let first = first.get_or_insert_with(|| card.clone());
        ensure!(*first == card, "--data-parallel-size: the GPUs are a {first} and a {card}, but must be of one kind");
    }
    Ok(())
}

fn card(exec: &mut Exec) -> Result<String> {
    Ok(exec.gpu()?.info()?.name)
}

/// Name of the GPUs of an engine, which are of the kind `card`.
pub fn device_name(gpus: &[usize], card: &str) -> String {
    let consecutive = gpus.windows(2).all(|pair| pair[0] + 1 == pair[1]);
    match gpus {
        [only] => format!("cuda:{only} ({card})"),
        [first, .., last] if consecutive => format!("cuda:{first} to cuda:{last} ({} x {card})", gpus.len()),
        _ => {
            let list = gpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            format!("cuda:{list} ({} x {card})", gpus.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_take_their_gpus_in_order() {
        // One GPU holds the model, or two do.
        for (needs, engines, expected) in
            [(1, 3, vec![vec![3], vec![1], vec![0]]), (2, 2, vec![vec![3, 1], vec![0, 2]])]
        {
            let opened = std::cell::RefCell::new(Vec::new());
            let open = |gpus: &[usize], ranks: Option<NonZeroUsize>| {
                let gpus = gpus[..ranks.map_or(needs, Into::into)].to_vec();
                let execs = gpus.iter().map(|_| Exec::meta().unwrap()).collect();
                opened.borrow_mut().push(gpus);
                Ok(OpenDevice { execs, name: String::new(), shows_progress: false })
            };
            assert_eq!(open_gpus(&[3, 1, 0, 2], (engines, None), open).unwrap().len(), engines);
            assert_eq!(opened.into_inner(), expected);
        }
        let error = |engines, ranks| {
            let refused = open_gpus(&[1, 2], (engines, NonZeroUsize::new(ranks)), |_, _| unreachable!());
            refused.err().unwrap().to_string()
        };
        let message = "--data-parallel-size 3: the engines need 3 GPUs, and this machine has 2 from cuda:1 on";
        assert_eq!(error(3, 0), message);
        assert!(error(2, 2).contains("the engines need 4 GPUs"));
    }

    #[test]
    fn devices_are_named_by_their_gpus() {
        for (gpus, name) in
            [(&[2][..], "cuda:2 (H200)"), (&[2, 3], "cuda:2 to cuda:3 (2 x H200)"), (&[3, 2], "cuda:3,2 (2 x H200)")]
        {
            assert_eq!(device_name(gpus, "H200"), name);
        }
    }
}
