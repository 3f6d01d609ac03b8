//! Ranks on the CPU that load parts of a small checkpoint.

use super::*;
use crate::isa::Isa;
use crate::tensor::Tensor;
use crate::weights::{Columns, FillDummy, SourceTensor, StoredDtype as Dtype};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Chunks of a few rows, two of them in memory.
const LIMITS: FeedLimits = FeedLimits { chunk_bytes: 100, chunks: 2 };
const NO_DUMMY: FillDummy<'static> = &|_, _, _, _| panic!("it is a checkpoint");

/// A checkpoint with tensors of several formats.
fn checkpoint(name: &str) -> (PathBuf, Source) {
    let dir = std::env::temp_dir().join(format!("pegainfer-ranks-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let narrow = |n: usize| (0..n).flat_map(|i| bf16::from_f32(i as f32).to_le_bytes()).collect::<Vec<u8>>();
    let half = (0..300 * 8).flat_map(|i| f16::from_f32(i as f32 * 0.3).to_le_bytes()).collect();
    let ids = (0..40 * 3i64).flat_map(|i| (i % 7).to_le_bytes()).collect();
    let tensors = [
        ("norm", Dtype::BF16, vec![77], narrow(77)),
        ("rows", Dtype::BF16, vec![48, 20], narrow(48 * 20)),
        ("columns", Dtype::BF16, vec![30, 48], narrow(30 * 48)),
        ("half", Dtype::F16, vec![300, 8], half),
        ("overlap", Dtype::BF16, vec![100, 5], narrow(500)),
        ("scales", Dtype::F8_E8M0, vec![16, 24], (0..16 * 24).map(|i| (i % 255) as u8).collect()),
        ("ids", Dtype::I64, vec![40, 3], ids),
    ];
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (*name, view)
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    let source = Source::open(&dir).unwrap();
    (dir, source)
}

/// A rank's part of each tensor.
fn parts(loader: &mut Loader<'_>, rank: usize, ranks: usize) -> Result<Vec<Tensor>, WeightsError> {
    let part = |n: usize| n / ranks * rank..n / ranks * (rank + 1);
    let rows = |name: &str, rows: usize, part| SourceTensor { name: name.to_owned(), rows, part };
    let columns = |stored: usize| Columns { stored, part: part(stored) };
    let overlap = if rank == 0 { 0..60 } else { 30..100 };
    let scales = SourceTensor::whole("scales".to_owned(), 16);
    let mut loaded = vec![
        loader.vector("norm".to_owned(), 77)?,
        // The rows of the rank, then some that another rank has.
        loader.stacked("stacked", &[rows("rows", 48, part(48)), rows("rows", 48, 40..48)], 20)?,
        loader.stacked("columns", &[SourceTensor::whole("columns".to_owned(), 30)], columns(48))?,
    ];
    // In another order on the last rank.
    for name in if rank + 1 == ranks { ["overlap", "half"] } else { ["half", "overlap"] } {
        loaded.push(match name {
            "half" => loader.matrix("half".to_owned(), 300, 8)?,
            _ => loader.stacked("overlap", &[rows("overlap", 100, overlap.clone())], 5)?,
        });
    }
    loaded.push(loader.raw("scales", &[scales], Some(&columns(24)), Dtype::F8_E8M0, NO_DUMMY)?);
    loaded.push(loader.indices("ids".to_owned(), [40, 3], 7, NO_DUMMY)?);
    Ok(loaded)
}

fn cpu() -> Exec {
    Exec::cpu(Isa::Portable, Some(2)).unwrap()
}

/// Ranks on the CPU, or all on one GPU.
fn execs(ranks: usize, gpu: bool) -> Vec<Exec> {
    (0..ranks).map(|_| if gpu { Exec::cuda(0, Some(2)).unwrap() } else { cpu() }).collect()
}

/// Loads all ranks with small chunks.
fn load<R: Send>(
    execs: &mut [Exec],
    source: &Source,
    progress: &mut (dyn FnMut(u64) + Send),
    load: impl Fn(&mut Loader<'_>, usize) -> Result<R, WeightsError> + Sync,
) -> Result<Vec<R>, WeightsError> {
    let mut shapes: Vec<_> = execs.iter().map(|_| (Exec::meta().unwrap(), ignore as fn(u64))).collect();
    let requests = requests(&mut shapes, source, &load)?;
    let shared = SharedReads::new(&requests, LIMITS);
    assert!(!shared.feed.is_empty());
    run_from(Some(&shared), execs.iter_mut().collect(), source, progress, load)
}

/// Runs `f` on a separate thread; the test fails if it does not end.
fn ends<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, result) = channel();
    std::thread::spawn(move || sender.send(f()).unwrap());
    result.recv_timeout(Duration::from_secs(60)).expect("the load ends")
}

/// Each of `ranks` ranks gets the bytes that it gets if it is loaded alone.
fn parts_are_those_of_each_rank(ranks: usize, gpu: bool) {
    let (dir, source) = checkpoint(&format!("parts-{ranks}-{gpu}"));
    let (mut told, mut bytes, mut execs) = (0, 0, execs(ranks, gpu));
    let mut progress = |loaded| told += loaded;
    let loaded = load(&mut execs, &source, &mut progress, |loader, rank| parts(loader, rank, ranks)).unwrap();
    for (rank, (exec, loaded)) in execs.iter().zip(&loaded).enumerate() {
        let mut host = cpu();
        let alone = Loader::run(&mut host, &source, &mut |_| {}, |loader| parts(loader, rank, ranks)).unwrap();
        assert_eq!(loaded.len(), alone.len());
        for (together, alone) in loaded.iter().zip(&alone) {
            assert_eq!((together.name(), together.shape()), (alone.name(), alone.shape()));
            let mut values = vec![0; alone.bytes() as usize];
            exec.read_bytes(together, &mut values).unwrap();
            assert!(values == alone.host_bytes(), "{} of rank {rank}", alone.name());
            bytes += alone.bytes();
        }
    }
    assert_eq!(told, bytes);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn every_rank_gets_its_part() {
    for ranks in [2, 3, 4] {
        ends(move || parts_are_those_of_each_rank(ranks, false));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_rank_on_a_gpu_gets_its_part() {
    for ranks in [2, 4] {
        ends(move || parts_are_those_of_each_rank(ranks, true));
    }
}

#[test]
fn shared_rows_are_read_once() {
    ends(|| {
        let (dir, source) = checkpoint("once");
        let Source::Checkpoint(checkpoint) = &source else { panic!("it is a checkpoint") };
        let three = |loader: &mut Loader<'_>, rank: usize| {
            let rows = if rank == 0 { 0..60 } else { 30..100 };
            let overlap = SourceTensor { name: "overlap".to_owned(), rows: 100, part: rows };
            let columns = Columns { stored: 48, part: 24 * rank..24 * (rank + 1) };
            let whole = SourceTensor::whole("columns".to_owned(), 30);
            Ok((
                loader.stacked("overlap", &[overlap], 5)?,
                loader.stacked("columns", &[whole], columns)?,
                loader.matrix("half".to_owned(), 300, 8)?,
            ))
        };
        load(&mut execs(2, false), &source, &mut |_| {}, three).unwrap();
        assert_eq!(checkpoint.bytes_read(), 2 * (100 * 5 + 30 * 48 + 300 * 8));
        std::fs::remove_dir_all(&dir).unwrap();
    });
}

#[test]
fn a_rank_that_fails_ends_the_load_of_all() {
    let error = ends(|| {
        let (dir, source) = checkpoint("fails");
        let fails = |loader: &mut Loader<'_>, rank: usize| {
            let norm = loader.vector("norm".to_owned(), 77)?;
            match rank == 1 && loader.exec().device() != crate::exec::Device::Meta {
                true => Err(WeightsError::MissingTensor { name: "mine".to_owned() }),
                false => Ok((norm, loader.matrix("half".to_owned(), 300, 8)?)),
            }
        };
        let error = load(&mut execs(3, false), &source, &mut |_| {}, fails).unwrap_err().to_string();
        std::fs::remove_dir_all(&dir).unwrap();
        error
    });
    assert!(error.contains("no tensor mine"), "{error}");
}

#[test]
fn indices_beyond_the_limit_are_refused_by_name() {
    let (dir, source) = checkpoint("indices");
    let mut exec = cpu();
    let load = |loader: &mut Loader<'_>| loader.indices("ids".to_owned(), [40, 3], 6, NO_DUMMY);
    let error = Loader::run(&mut exec, &source, &mut |_| {}, load).unwrap_err().to_string();
    assert!(error.starts_with("ids is I64 with number 6, but config.json asks for numbers below 6"), "{error}");
    std::fs::remove_dir_all(&dir).unwrap();
}
