//! Number of GPUs for a number of users.

use super::search::HighestRates;
use super::simulation::Simulation;
use anyhow::{Context, Result};
use std::time::Duration;

/// A sentence with the number of engines, and of their GPUs, for `users` users who send a request every `interval` on
/// average. Requests of many users are a Poisson process. Engines have the rate that keeps the margin.
pub fn gpus(simulation: &Simulation, highest: &HighestRates, users: usize, interval: Duration) -> Result<String> {
    let simulated = simulation.engines as f64;
    let each = highest.with_margin.context("--users: no rate keeps the limits with the margin; allow longer times")?;
    let rate = users as f64 / interval.as_secs_f64();
    let engines = engines(rate, each / simulated);
    let gpus = engines * simulation.header.ranks;
    let plural = |count: usize, name: &str| if count == 1 { format!("1 {name}") } else { format!("{count} {name}s") };
    let of = if gpus == engines {
        String::new()
    } else {
        format!(", {} of {} each", plural(engines, "engine"), simulation.header.ranks)
    };
    Ok(format!(
        "{} with a request every {interval:?} each are {rate:.2} requests per second: {}{of}, at {:.0} % of what they can take. \
         One more keeps the limits while one is replaced.\n",
        plural(users, "user"),
        plural(gpus, "GPU"),
        100.0 * rate / (engines as f64 * each / simulated)
    ))
}

/// Number of engines that take `rate` requests per second, if each takes `each`.
fn engines(rate: f64, each: f64) -> usize {
    (rate / each).ceil().max(1.0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shipped::{self, ShippedArgs};
    use crate::sim::search::{Lengths, Slo, highest_rate};
    use std::num::NonZeroUsize;

    #[test]
    fn a_part_of_an_engine_is_an_engine() {
        for (rate, each, expected) in [(0.01, 10.0, 1), (10.0, 10.0, 1), (10.1, 10.0, 2), (95.0, 10.0, 10)] {
            assert_eq!(engines(rate, each), expected, "{rate} of {each}");
        }
    }

    #[test]
    fn users_have_enough_gpus_for_their_rate() {
        let shipped = ShippedArgs { gpu: Some("h200x2".into()), model: Some("deepseek-v4-flash".into()) };
        let simulation = Simulation::new(&shipped::read(None, &shipped).unwrap()).unwrap();
        let slo = Slo { ttft: Some(Duration::from_millis(500)), tpot: Some(Duration::from_millis(20)), quantile: 90 };
        let length = |n: usize| NonZeroUsize::new(n).unwrap();
        let lengths = Lengths { prompt: length(256), output: length(32), requests: Some(length(300)) };
        let highest = highest_rate(&simulation, slo, lengths, (1, 1)).unwrap();
        let rate = highest.with_margin.unwrap();
        let text = highest.to_string();
        assert!(text.contains(&format!("with that margin, {rate:.2} requests per second.")), "{text}");
        let most: f64 = text.split(' ').next().unwrap().parse().unwrap();
        assert!(rate < most, "the margin costs nothing: {text}");
        // Two and a half engines of two GPUs each.
        let users = (2.5 * rate * 60.0) as usize;
        let text = gpus(&simulation, &highest, users, Duration::from_secs(60)).unwrap();
        assert!(text.contains(": 6 GPUs, 3 engines of 2 each, at 83 % of what they can take."), "{text}");
    }
}
