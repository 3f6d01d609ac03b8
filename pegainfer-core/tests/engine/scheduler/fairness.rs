//! Fairness between tenants and groups when not all requests can run.

use super::{VOCAB, plain, run_step, scheduler, scheduler_with};
use pegainfer_core::engine::{EventBatch, GenerateRequest, RequestId, TokenEvent};
use pegainfer_core::schedule::Scheduler;
use std::collections::HashMap;

/// A request for `max_tokens` tokens with its own prompt, by a member of a group.
fn request(id: u64, (group, member): (u64, u64), max_tokens: usize) -> GenerateRequest {
    let prompt: Vec<u32> = (0..20).map(|place| (id as u32 * 31 + place * 7) % VOCAB).collect();
    let tenant = group << 32 | member;
    GenerateRequest { ignore_eos: true, tenant, ..GenerateRequest::greedy(prompt, max_tokens) }
}

fn admitted(events: &EventBatch) -> impl Iterator<Item = u64> {
    events.iter().filter(|(_, event)| matches!(event, TokenEvent::Admitted { .. })).map(|(id, _)| id.0)
}

/// Number of steps until request `id` is admitted; fails after `max_steps`.
fn steps_until_admitted(scheduler: &mut Scheduler, id: u64, max_steps: usize) -> usize {
    let mut steps = (1..=max_steps).filter(|_| admitted(&run_step(scheduler).1).any(|other| other == id));
    steps.next().unwrap_or_else(|| panic!("request {id} was not admitted within {max_steps} steps"))
}

/// 250 tenants with 4 requests each for 4,000 tokens; 64 sequences may run at once. `group` maps a tenant to its group.
fn many_tenants(group: impl Fn(u64) -> u64) -> Scheduler {
    let mut scheduler = scheduler(64, 512, 40_000);
    for id in 0..1000 {
        scheduler.add(RequestId(id), request(id, (group(id % 250), id % 250), 4000));
    }
    scheduler
}

#[test]
fn a_newcomer_does_not_wait_for_the_end_of_long_sequences_of_many_tenants() {
    // Keys, each its own group, and addresses of one network.
    for own in [true, false] {
        let mut scheduler = many_tenants(|tenant| if own { 1 + tenant } else { 1 });
        (0..1500).for_each(|_| drop(run_step(&mut scheduler)));
        let group = if own { 999 } else { 1 };
        for newcomer in 0..5 {
            let id = 5000 + newcomer;
            scheduler.add(RequestId(id), request(id, (group, id), 10));
            let steps = steps_until_admitted(&mut scheduler, id, 160);
            println!("own groups {own}: newcomer {newcomer} was admitted after {steps} steps");
            (0..20).for_each(|_| drop(run_step(&mut scheduler)));
        }
    }
}

#[test]
fn a_newcomer_among_those_who_came_at_once_waits_for_a_part_of_a_round() {
    let mut scheduler = many_tenants(|tenant| 1 + tenant);
    (0..10).for_each(|_| drop(run_step(&mut scheduler)));
    scheduler.add(RequestId(5000), request(5000, (999, 0), 10));
    // 186 others came before it; 64 yield every 128 steps.
    let steps = steps_until_admitted(&mut scheduler, 5000, 600);
    assert!(steps > 128, "{steps} steps: it overtook others that had not run either");
}

#[test]
fn many_addresses_of_a_network_yield_to_another_one_at_once() {
    let mut scheduler = many_tenants(|_| 1);
    (0..10).for_each(|_| drop(run_step(&mut scheduler)));
    scheduler.add(RequestId(5000), request(5000, (2, 0), 10));
    assert_eq!(steps_until_admitted(&mut scheduler, 5000, 160), 1);
}

#[test]
fn tenants_of_equal_number_are_served_alike_and_all_end() {
    let mut scheduler = scheduler(8, 512, 2000);
    for id in 0..40 {
        scheduler.add(RequestId(id), request(id, (1 + id % 20, 0), 600));
    }
    let (mut tokens, mut ended) = (HashMap::<u64, usize>::new(), 0);
    for step in 0..100_000 {
        if !scheduler.has_work() {
            break;
        }
        for (id, event) in run_step(&mut scheduler).1 {
            match event {
                TokenEvent::Token(_) => *tokens.entry(id.0 % 20).or_default() += 1,
                TokenEvent::Finished { .. } => ended += 1,
                _ => {}
            }
        }
        if step == 1600 {
            let (min, max) = (tokens.values().min().unwrap(), tokens.values().max().unwrap());
            assert!(tokens.len() == 20 && max - min <= 3 * 128, "{min} to {max} tokens each");
        }
    }
    assert_eq!(ended, 40);
    let stats = scheduler.stats();
    assert!(stats.preemptions <= (40 * 600 / 128) as u64, "{} preemptions", stats.preemptions);
    assert_eq!(stats.generation_tokens, 40 * 600);
    assert!(stats.steps <= 40 * 600 / 8 + 600, "{} steps: slots were idle", stats.steps);
}

#[test]
fn nobody_yields_where_nobody_else_waits() {
    let alone = |id: u64| request(id, (1, 0), 400);
    let each = |id: u64| request(id, (1 + id, 0), 400);
    for (requests, of) in [(100, &alone as &dyn Fn(u64) -> GenerateRequest), (16, &each)] {
        let mut scheduler = scheduler(16, 512, 4000);
        (0..requests).for_each(|id| scheduler.add(RequestId(id), of(id)));
        while scheduler.has_work() {
            run_step(&mut scheduler);
        }
        let stats = scheduler.stats();
        assert_eq!((stats.preemptions, stats.generation_tokens), (0, 400 * requests));
    }
}

#[test]
fn long_sequences_that_fill_the_kv_pool_yield_too() {
    // Four tenants' sequences of 500 tokens fill 100 blocks; a fifth one's prompt has no place.
    let mut scheduler = scheduler(16, 512, 100);
    for id in 0..12 {
        scheduler.add(RequestId(id), request(id, (1 + id % 4, 0), 480));
    }
    for _ in 0..2000 {
        if scheduler.stats().kv_blocks_free < 5 {
            break;
        }
        run_step(&mut scheduler);
    }
    let prompt: Vec<u32> = (0..200).map(|place| place % VOCAB).collect();
    let long = GenerateRequest { tenant: 9 << 32, ignore_eos: true, ..GenerateRequest::greedy(prompt, 10) };
    scheduler.add(RequestId(100), long);
    let steps = steps_until_admitted(&mut scheduler, 100, 200);
    println!("admitted after {steps} steps");
    let mut steps = 0;
    while scheduler.has_work() {
        run_step(&mut scheduler);
        steps += 1;
        assert!(steps < 20_000, "they hinder each other");
    }
    scheduler.check_blocks().unwrap();
}

#[test]
fn a_short_request_does_not_wait_while_long_sequences_fill_the_kv_pool() {
    // 256 sequences of 20 groups grow to 1,000 tokens each, in a pool for 800 each.
    let (long, sequences) = (1000, 256);
    let mut scheduler = scheduler_with(sequences, (2048, 512), sequences * 800 / 16);
    for id in 0..1000 {
        scheduler.add(RequestId(id), request(id, (1 + id % 20, 0), long));
    }
    while scheduler.stats().kv_blocks_free > sequences {
        run_step(&mut scheduler);
    }
    let waits = (0..40u64).map(|chat| {
        let id = 2000 + chat;
        let prompt: Vec<u32> = (0..300).map(|place| (id as u32 + place * 3) % VOCAB).collect();
        let chat = GenerateRequest { tenant: 99 << 32, ignore_eos: true, ..GenerateRequest::greedy(prompt, 10) };
        scheduler.add(RequestId(id), chat);
        let steps = steps_until_admitted(&mut scheduler, id, 1000);
        (0..25).for_each(|_| drop(run_step(&mut scheduler)));
        steps
    });
    let waits = Vec::from_iter(waits);
    println!("admitted after {waits:?} steps");
    assert!(waits.iter().all(|steps| *steps <= 8), "{waits:?}");
    scheduler.check_blocks().unwrap();
}

#[test]
fn tenants_with_one_sequence_each_do_not_preempt_each_other_for_nothing() {
    // 64 tenants with a sequence of 1,000 tokens each, in a pool for 800 each.
    let (sequences, long) = (64, 1000);
    let mut scheduler = scheduler_with(sequences, (2048, 512), sequences * 800 / 16);
    for id in 0..sequences as u64 {
        scheduler.add(RequestId(id), request(id, (1 + id, 0), long));
    }
    while scheduler.has_work() {
        run_step(&mut scheduler);
    }
    let preemptions = scheduler.stats().preemptions;
    assert!(preemptions <= 2 * sequences as u64, "{preemptions} preemptions");
}

#[test]
fn a_tenant_with_many_requests_does_not_starve_another() {
    let mut scheduler = scheduler(4, 64, 256);
    let request = |tenant| GenerateRequest { tenant, ..plain(40) };
    for id in 0..20 {
        scheduler.add(RequestId(id), request(1));
    }
    (0..3).for_each(|_| drop(run_step(&mut scheduler)));
    scheduler.add(RequestId(100), request(2));
    scheduler.add(RequestId(101), request(2));
    scheduler.add(RequestId(102), request(2));
    let mut admitted = vec![];
    for _ in 0..3 {
        let (_, events) = run_step(&mut scheduler);
        admitted.extend(events.iter().filter(|(_, e)| matches!(e, TokenEvent::Admitted { .. })).map(|(id, _)| id.0));
    }
    assert_eq!(admitted, [100, 101], "each tenant has two of the four slots");
    assert_eq!(scheduler.stats().preemptions, 2);
    let mut finished = vec![];
    while scheduler.has_work() {
        let (_, events) = run_step(&mut scheduler);
        finished.extend(events.iter().filter(|(_, e)| matches!(e, TokenEvent::Finished { .. })).map(|(id, _)| id.0));
    }
    finished.sort_unstable();
    assert_eq!(finished, Vec::from_iter((0..20).chain(100..103)));
}

#[test]
fn one_plan_exchanges_all_sequences_that_are_due() {
    // Tenant 1 runs 16; tenants 2 and 3 send ten requests each, and nothing is planned ahead of a plan that exchanges.
    let mut scheduler = scheduler(16, 512, 2000);
    for id in 0..20 {
        scheduler.add(RequestId(id), request(id, (1, 0), 400));
    }
    (0..3).for_each(|_| drop(run_step(&mut scheduler)));
    for id in 100..120 {
        scheduler.add(RequestId(id), request(id, (2 + id % 2, 0), 20));
    }
    let admitted: Vec<u64> = admitted(&run_step(&mut scheduler).1).collect();
    assert_eq!(admitted, Vec::from_iter(100..110), "each of three tenants has a third of the slots");
    assert_eq!(scheduler.stats().preemptions, 10);
    (0..10).for_each(|_| drop(run_step(&mut scheduler)));
    assert_eq!(scheduler.stats().preemptions, 10, "nothing more is due");
}

#[test]
fn sequences_go_on_until_a_step_has_tokens_for_those_that_replace_them() {
    let mut scheduler = scheduler(16, 128, 2000);
    for id in 0..16 {
        scheduler.add(RequestId(id), request(id, (1, 0), 400));
    }
    (0..5).for_each(|_| drop(run_step(&mut scheduler)));
    for id in 100..110 {
        let prompt: Vec<u32> = (0..100).map(|place| (id as u32 * 31 + place * 7) % VOCAB).collect();
        let long = GenerateRequest { tenant: 2 << 32, ..GenerateRequest::greedy(prompt, 10) };
        scheduler.add(RequestId(id), long);
    }
    run_step(&mut scheduler);
    assert_eq!(scheduler.stats().preemptions, 2, "two prompts fill a step");
}
