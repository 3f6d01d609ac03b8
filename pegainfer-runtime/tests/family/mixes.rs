//! Each request of a mix of all sampling options gives what it gives alone, see [`crate::support::mixes`].

use crate::support::{
    Family, MIXES_CACHE, MIXES_STEPS, Target, best, engine, mixes, model_path, options, samples, targets,
};
use pegainfer_core::weights::Source;
use pegainfer_runtime::{Bounds, Executor, LoadOptions, Model, StepSize, load_weights, uniform};

#[test]
fn each_request_gives_what_it_gives_alone() {
    if best() == Target::Cuda {
        println!("not for a GPU, where sums depend on the batch: see the tests of invariance");
        return;
    }
    // Few blocks, so that sequences are preempted.
    let small = LoadOptions {
        kv_cache_bytes: Some(MIXES_CACHE),
        max_num_seqs: Some(16),
        max_model_len: Some(128),
        ..options()
    };
    mixes::each_request_gives_what_it_gives_alone(MIXES_STEPS, |speculation| {
        engine(best(), &LoadOptions { speculation, ..small.clone() })
    });
}

/// The last layer goes on with what is sampled.
#[test]
fn what_is_drawn_does_not_depend_on_what_else_is() {
    for target in targets() {
        let mut exec = target.exec();
        let config = Family::load_config(&model_path()).unwrap();
        let source = Source::open(&model_path()).unwrap();
        let weights = load_weights::<Family>(&mut exec, &config, &source, &mut |_| {}).unwrap();
        let size = StepSize { tokens: 120, rows: 120, samples: 120, context: 40 };
        let mut executor = Executor::<Family>::on_one(exec, config, weights, &Bounds::exact(size, 9)).unwrap();
        for step in [uniform::<Family>(3, 40, 40), uniform::<Family>(4, 1, 1)] {
            samples::hold(target, &mut executor, &step);
        }
    }
}
