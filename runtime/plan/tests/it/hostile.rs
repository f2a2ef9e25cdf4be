//! The reader of plans against files that lie: flipped bytes, cuts, and bodies that say anything under valid checksums.
//! Whatever the bytes, reading ends soon, does not panic, and allocates no more than the file's size and 64 MB.

mod programs;

use std::time::{Duration, Instant};

use crate::counting_allocator::peak_during;
use crate::support;
use gemma4c_plan::{Plan, PlanError, VERSION};
use xxhash_rust::xxh3::xxh3_64;

const SLACK: usize = 64 << 20;
const HEADER: usize = 32;
const ENTRY: usize = 32;
const SECTIONS: usize = 11;

/// What became of the cases so far.
struct Tally {
    name: &'static str,
    cases: usize,
    accepted: usize,
    /// Refused after all checksums were found right.
    refused_by_content: usize,
    highest_peak: usize,
    started: Instant,
}

impl Tally {
    fn new(name: &'static str) -> Tally {
        let started = Instant::now();
        Tally { name, cases: 0, accepted: 0, refused_by_content: 0, highest_peak: 0, started }
    }

    /// Reads `bytes` and keeps the promises.
    fn check(&mut self, bytes: &[u8], what: impl Fn() -> String) {
        let start = Instant::now();
        let caught = std::panic::catch_unwind(|| peak_during(|| Plan::from_bytes(bytes)));
        let (result, peak) = caught.unwrap_or_else(|_| panic!("{}: a panic", what()));
        // The file's own bytes are the caller's; what is kept of the machine code is as large again.
        assert!(peak <= bytes.len() + SLACK, "{}: {peak} bytes held for a file of {}", what(), bytes.len());
        assert!(start.elapsed() < Duration::from_secs(5), "{}: {:?}", what(), start.elapsed());
        self.cases += 1;
        self.highest_peak = self.highest_peak.max(peak);
        match result {
            Ok(_) => self.accepted += 1,
            Err(error) => {
                let message = error.to_string();
                assert!(message.len() < 500 && !message.contains(char::is_control), "{}: {message:?}", what());
                let content = matches!(error, PlanError::Decode { .. } | PlanError::Invalid(_));
                self.refused_by_content += usize::from(content);
            }
        }
    }

    fn report(&self) {
        let Tally { name, cases, accepted, refused_by_content, highest_peak, started } = self;
        let (peak, time) = (highest_peak >> 10, started.elapsed());
        eprintln!(
            "{name}: {cases} cases, {accepted} accepted, {refused_by_content} refused by content, {peak} KiB, {time:?}"
        );
    }
}

/// Splitmix64: any mix will do, as long as it is the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

fn entry(bytes: &[u8], section: usize, field: usize) -> u64 {
    let at = HEADER + section * ENTRY + field;
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The bodies of a plan's sections.
fn bodies(bytes: &[u8]) -> [Vec<u8>; SECTIONS] {
    std::array::from_fn(|i| bytes[entry(bytes, i, 8) as usize..][..entry(bytes, i, 16) as usize].to_vec())
}

/// A file of these bodies with a table and checksums that are right.
fn sealed(bodies: &[Vec<u8>; SECTIONS]) -> Vec<u8> {
    let start = HEADER + SECTIONS * ENTRY;
    let length = start + bodies.iter().map(Vec::len).sum::<usize>();
    let mut header = b"gemma4c\0".to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((SECTIONS as u32).to_le_bytes());
    header.extend((length as u64).to_le_bytes());
    let (mut table, mut offset) = (Vec::new(), start as u64);
    for (kind, body) in bodies.iter().enumerate() {
        table.extend((kind as u64).to_le_bytes());
        for number in [offset, body.len() as u64, xxh3_64(body)] {
            table.extend(number.to_le_bytes());
        }
        offset += body.len() as u64;
    }
    let checksum = xxh3_64(&[&header[..], &table[..]].concat());
    [&header[..], &checksum.to_le_bytes(), &table, &bodies.concat()].concat()
}

/// `file` with the checksum of its header made right again.
fn with_header_sealed(mut file: Vec<u8>) -> Vec<u8> {
    let table = HEADER..HEADER + SECTIONS * ENTRY;
    let checksum = xxh3_64(&[&file[..HEADER - 8], &file[table]].concat());
    file[HEADER - 8..HEADER].copy_from_slice(&checksum.to_le_bytes());
    file
}

#[test]
fn sealing_is_what_the_writer_does() {
    let bytes = support::plan().to_bytes().unwrap();
    assert_eq!(sealed(&bodies(&bytes)), bytes);
    assert_eq!(with_header_sealed(bytes.clone()), bytes);
}

#[test]
fn every_cut_is_refused() {
    let bytes = support::plan().to_bytes().unwrap();
    let mut tally = Tally::new("cuts");
    for len in 0..bytes.len() {
        tally.check(&bytes[..len], || format!("cut to {len}"));
    }
    for more in 1..70 {
        let longer = [&bytes[..], &vec![0; more]].concat();
        tally.check(&longer, || format!("{more} bytes appended"));
    }
    assert_eq!(tally.accepted, 0);
    tally.report();
}

#[test]
fn every_flipped_byte_is_noticed() {
    let bytes = support::plan().to_bytes().unwrap();
    let mut tally = Tally::new("flips");
    for at in 0..bytes.len() {
        for flip in [0x01, 0x10, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= flip;
            tally.check(&bytes, || format!("byte {at} ^ {flip:#x}"));
        }
    }
    assert_eq!((tally.accepted, tally.refused_by_content), (0, 0), "checksums cover every byte");
    tally.report();
}

/// Weights behind a plan: where a file is cut, or in front of them one bit is another, is noticed without reading them.
#[test]
fn a_plan_with_its_weights_is_whole_or_refused() {
    for plan in [support::plan(), support::cpu_plan()] {
        let (plan, file) = support::embedded(plan);
        let own = plan.to_bytes().unwrap().len();
        let mut tally = Tally::new("embedded");
        for len in (0..own).step_by(7).chain(own..file.len()) {
            tally.check(&file[..len], || format!("cut to {len}"));
        }
        for at in 0..own {
            let mut file = file.clone();
            file[at] ^= 0x10;
            tally.check(&file, || format!("byte {at}"));
        }
        assert_eq!(tally.accepted, 0);
        // What the plan says of its weights, under valid checksums.
        let original = bodies(&file);
        let mut random = Random(8);
        for case in 0..2000 {
            let mut bodies = original.clone();
            mutate(&mut bodies[8], &mut random);
            let mut mutant = sealed(&bodies);
            mutant.resize(mutant.len().next_multiple_of(4096), 0);
            mutant.extend(&file[own.next_multiple_of(4096)..]);
            tally.check(&mutant, || format!("case {case}"));
        }
        tally.report();
    }
}

#[test]
fn the_table_may_say_anything() {
    let bytes = support::plan().to_bytes().unwrap();
    let mut tally = Tally::new("tables");
    let nasty = [0, 1, 31, 0x7fff_ffff, 0xffff_ffff, 1 << 32, 1 << 60, (1 << 63) - 1, u64::MAX, bytes.len() as u64];
    for at in (8..HEADER + SECTIONS * ENTRY - 7).filter(|at| !(HEADER - 15..HEADER).contains(at)) {
        for number in nasty {
            let mut bytes = bytes.clone();
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            tally.check(&with_header_sealed(bytes), || format!("{number:#x} at {at}"));
        }
    }
    assert!(tally.accepted < 20, "only a number that was there already is right");
    tally.report();
}

/// One change to one body: bytes of it flipped, numbers made large, parts cut, repeated or moved.
fn mutate(body: &mut Vec<u8>, random: &mut Random) {
    // A varint of 0, 1, 127, 2^28, 2^32 - 1 and 2^64 - 1: what counts, sizes and indices are made of.
    const NUMBERS: [&[u8]; 6] = [
        &[0],
        &[1],
        &[0x7f],
        &[0x80, 0x80, 0x80, 0x80, 1],
        &[0xff, 0xff, 0xff, 0xff, 0x0f],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
    ];
    let at = random.below(body.len() + 1);
    let run = random.below(12).min(body.len() - at);
    match random.below(7) {
        0 => body.truncate(at),
        1 => drop(body.drain(at..at + run)),
        2 => {
            let number = NUMBERS[random.below(NUMBERS.len())];
            body.splice(at..(at + 1).min(body.len()), number.iter().copied());
        }
        3 => {
            let piece = body[at..at + run].to_vec();
            body.splice(at..at, piece);
        }
        4 if run > 0 => {
            let from = random.below(body.len() - run);
            body.copy_within(from..from + run, at);
        }
        5 if at < body.len() => body[at] = body[at].wrapping_add([1, 0xff][random.below(2)]),
        _ if at < body.len() => body[at] ^= 1 << random.below(8),
        _ => {}
    }
}

#[test]
fn bodies_may_say_anything_under_valid_checksums() {
    let original = bodies(&support::plan().to_bytes().unwrap());
    let mut random = Random(0x9e37);
    let mut tally = Tally::new("bodies");
    for case in 0..30_000 {
        let mut bodies = original.clone();
        let section = [0, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6, 6, 6, 6, 7, 8][random.below(16)];
        for _ in 0..1 + random.below(3) {
            mutate(&mut bodies[section], &mut random);
        }
        let bytes = sealed(&bodies);
        let decoded = Plan::from_bytes(&bytes);
        tally.check(&bytes, || format!("case {case}, section {section}"));
        // What is accepted is a plan like any other: it can be written and read again, and is then the same.
        if let Ok(plan) = decoded {
            let again = Plan::from_bytes(&plan.to_bytes().unwrap()).unwrap();
            // By their text, since not-a-number differs from itself.
            assert_eq!(format!("{plan:?}"), format!("{again:?}"), "case {case}");
        }
    }
    assert!(tally.accepted > 1000 && tally.refused_by_content > tally.cases / 2, "the cases have lost their bite");
    tally.report();
}

/// A section that is mostly one long list of the smallest parts there are: what costs the most memory a byte.
struct Crowd {
    name: &'static str,
    section: usize,
    /// What comes before the list.
    before: &'static [u8],
    part: &'static [u8],
    /// Zeros after the list that end the section well.
    zeros: usize,
}

impl Crowd {
    fn body(&self, count: usize) -> Vec<u8> {
        [self.before, &varint(count), &self.part.repeat(count), &vec![0; self.zeros]].concat()
    }
}

#[test]
fn crowds_stay_within_bounds() {
    let original = bodies(&support::plan().to_bytes().unwrap());
    let mut tally = Tally::new("crowds");
    let crowds: [Crowd; 9] = [
        Crowd { name: "files", section: 0, before: &[0, 0], part: &[0; 3], zeros: 5 },
        Crowd { name: "weights", section: 2, before: &[], part: &[0; 6], zeros: 0 },
        Crowd { name: "caches", section: 3, before: &[1, 1, 1, 0], part: &[0; 5], zeros: 3 },
        Crowd { name: "values", section: 3, before: &[1, 1, 1, 0, 0], part: &[0; 4], zeros: 2 },
        Crowd { name: "steps", section: 3, before: &[1, 1, 1, 0, 0, 0], part: &[0; 3], zeros: 1 },
        Crowd { name: "inputs of a step", section: 3, before: &[1, 1, 1, 0, 0, 0, 1, 0], part: &[0], zeros: 2 },
        Crowd { name: "tokens", section: 4, before: &[1, 0], part: &[0], zeros: 18 },
        Crowd { name: "token kinds", section: 4, before: &[1, 0, 0], part: &[0], zeros: 17 },
        Crowd { name: "merges", section: 4, before: &[1, 0, 0, 0], part: &[0; 3], zeros: 16 },
    ];
    for count in [1 << 10, 1 << 12, 1 << 14, 1 << 16, (1 << 16) + 1, 1 << 18, 1 << 20, (1 << 21) + 1, 5 << 20] {
        let mut all = original.clone();
        for crowd in &crowds {
            let mut bodies = original.clone();
            bodies[crowd.section] = crowd.body(count);
            tally.check(&sealed(&bodies), || format!("{count} {}", crowd.name));
            all[crowd.section] = std::mem::take(&mut bodies[crowd.section]);
        }
        all[5] = [varint(count), vec![b'x'; count]].concat();
        tally.check(&sealed(&all), || format!("{count} of everything"));
    }
    tally.report();

    // The most of everything that is read at all, held at the same time.
    let mut tally = Tally::new("the largest that decodes");
    let mut full = original.clone();
    for (section, at_most) in [(0, 1024), (2, 1 << 14), (4, 1 << 21)] {
        full[section] = crowds.iter().rfind(|crowd| crowd.section == section).unwrap().body(at_most);
    }
    let values = [&varint(1 << 16)[..], &[0; 4].repeat(1 << 16)].concat();
    let steps = [&varint(1 << 16)[..], &[0; 3].repeat(1 << 16)].concat();
    full[3] = [&[1, 1, 1, 0, 0][..], &values, &steps, &[0]].concat();
    full[5] = [varint((1 << 22) - 4), vec![b'x'; (1 << 22) - 4]].concat();
    // Two towers as large as the text: there is no room for a third.
    let program = [&[1, 1, 1, 0, 0, 0][..], &values, &steps, &[0]].concat();
    let tower = [&[0][..], &program, &[0; 6]].concat();
    full[9] = [&[2][..], &tower, &tower].concat();
    assert!(full[9].len() <= 1 << 20 && full[9].len() + tower.len() > 1 << 20);
    for (name, body) in programs::crowds() {
        assert!(body.len() <= 1 << 22, "{name}: {} bytes are not read at all", body.len());
        full[6] = body;
        tally.check(&sealed(&full), || format!("the largest that decodes, with {name}"));
        assert_eq!(tally.refused_by_content, tally.cases, "{name}: it does decode");
    }
    full[7] = programs::most_code();
    tally.check(&sealed(&full), || "the largest that decodes".into());
    assert_eq!(tally.refused_by_content, tally.cases);
    assert!(tally.highest_peak > 16 << 20, "it does decode: {} bytes held", tally.highest_peak);
    tally.report();
}

fn varint(mut n: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
    out
}
