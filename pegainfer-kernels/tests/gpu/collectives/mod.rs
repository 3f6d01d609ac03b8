//! Collectives of several GPUs, compared with exact sums and with NCCL, and their times.
//!
//! Two, four and eight ranks, as far as there are GPUs; with one GPU, a rank that loops back. NCCL is left out where it is
//! not found. Prints one JSON object a line, and panics if anything fails.

mod add_norm;
mod exact;
mod failure;
mod ranks;
mod timing;

/// All checks and measurements, or those of the given `parts`.
pub fn run(parts: &[String]) {
    let is_wanted = |part: &str| parts.is_empty() || parts.iter().any(|wanted| wanted == part);
    let gpus = pegainfer_kernels::cuda::available().unwrap();
    println!("{{\"gpus\":{gpus}}}");
    exact::loop_back();
    add_norm::loop_back();
    for count in [2, 4, 8] {
        if gpus < count {
            println!("{{\"ranks\":{count},\"skipped\":\"there are {gpus} GPUs\"}}");
            continue;
        }
        let start = std::time::Instant::now();
        if is_wanted("exact") {
            exact::sums(count);
            exact::columns(count);
            exact::rows(count);
            exact::queued(count);
            exact::replayed(count);
        }
        if is_wanted("add_norm") {
            add_norm::exact(count);
            add_norm::queued(count, 100_000);
            add_norm::replayed(count);
            add_norm::absent(count);
        }
        if is_wanted("failure") {
            failure::late(count);
            failure::absent(count);
            failure::aborted(count);
        }
        println!("{{\"ranks\":{count},\"passed\":true,\"seconds\":{:.1}}}", start.elapsed().as_secs_f64());
        if is_wanted("timing") {
            timing::run(count);
        }
    }
}
