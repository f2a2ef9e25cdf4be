//! What surrounds NVRTC, without it: its log, its errors, the cache of what it made, and its versions.

mod log {
    use gemma4c_codegen::nvrtc::Resources;
    use gemma4c_codegen::nvrtc::log::{entries, without_times};
    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     1280 bytes stack frame, 1948 bytes spill stores, 2508 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1440 bytes cumulative stack size, 1024 bytes smem, 368 bytes cmem[0]
ptxas info    : Compile time = 219.972 ms
ptxas info    : Function properties for _Z1fPfi
ptxas         .     160 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compile time = 3.056 ms";

    #[test]
    fn an_entry_owns_the_functions_called_from_it() {
        let second =
            Resources { registers: 32, shared_bytes: 1024, stack_bytes: 1440, spill_stores: 1952, spill_loads: 2516 };
        let first = Resources { registers: 10, ..Resources::default() };
        assert_eq!(entries(LOG), [("second", second), ("first", first)]);
        assert!(second.spills() && !first.spills());
    }

    #[test]
    fn times_are_dropped_and_nothing_else() {
        let kept = without_times(LOG);
        assert_eq!(kept.lines().count(), LOG.lines().count() - 2);
        assert_eq!(entries(&kept), entries(LOG));
    }

    #[test]
    fn a_log_of_another_shape_gives_no_entries() {
        assert_eq!(entries(""), []);
        assert_eq!(entries("Used 99999999999 registers, x bytes smem"), []);
    }
}

mod errors {
    use gemma4c_codegen::nvrtc::error::{blames_assembly, error_lines, excerpt, names_an_error};
    #[test]
    fn neighbours_are_shown_once_and_gaps_are_marked() {
        let text: String = (1..=20).map(|n| format!("line {n}\n")).collect();
        let shown = excerpt(&text, &[2, 4, 19, 400]);
        let expected: Vec<String> = (1..=7)
            .chain(16..=20)
            .map(|n| format!("{}{n:5} | line {n}", if [2, 4, 19].contains(&n) { '>' } else { ' ' }))
            .collect();
        assert_eq!(shown.lines().filter(|line| *line != "    ...").collect::<Vec<_>>(), expected);
        assert_eq!(shown.lines().nth(7), Some("    ..."));
    }

    #[test]
    fn only_errors_of_this_file_are_marked() {
        let log =
            "k.cu(3): warning #177-D: x\nk.cu(7): error: y\nother.cu(9): error: z\nk.cu(12): catastrophic error: w";
        assert_eq!(error_lines(log, "k.cu(", "):"), [7, 12]);
        assert!(names_an_error(log) && !blames_assembly(log));
        assert!(!names_an_error("ptxas info    : Compiling entry function 'error' for 'sm_90a'"));
        assert!(blames_assembly("ptxas application ptx input, line 39; error   : Unknown modifier '.bar'"));
    }
}

mod cache {
    use gemma4c_codegen::nvrtc::cache::Key;
    use gemma4c_codegen::nvrtc::{Cache, Cubin};
    use std::fs;
    #[test]
    fn parts_cannot_be_shifted_between_each_other() {
        assert_ne!(Key::of(&["ab", "c"]), Key::of(&["a", "bc"]));
        assert_ne!(Key::of(&["a"]), Key::of(&["a", ""]));
        assert_eq!(Key::of(&["a", "b"]), Key::of(&["a", "b"]));
    }

    #[test]
    fn every_cut_and_every_flipped_byte_is_a_miss() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = Key::of(&["kernel"]);
        let cubin = Cubin { bytes: vec![1, 2, 3], resources: Default::default(), log: "a log".to_owned() };
        assert_eq!(cache.load(key), None);
        cache.store(key, &cubin);
        assert_eq!(cache.load(key), Some(cubin));

        let file = cache.file(key).unwrap();
        let whole = fs::read(&file).unwrap();
        for at in 0..whole.len() {
            fs::write(&file, &whole[..at]).unwrap();
            assert_eq!(cache.load(key), None, "cut at byte {at}");
            let mut flipped = whole.clone();
            flipped[at] ^= 0x10;
            fs::write(&file, flipped).unwrap();
            assert_eq!(cache.load(key), None, "flipped byte {at}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_noted_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join("a file");
        fs::write(&blocked, "").unwrap();
        let cache = Cache::at(blocked.join("cubins"));
        assert_eq!(cache.problem(), None);
        cache.store(Key::of(&["kernel"]), &Cubin::default());
        assert!(cache.problem().unwrap().contains("cannot write to"), "{:?}", cache.problem());
    }
}

mod versions {
    use gemma4c_codegen::nvrtc::Version;
    #[test]
    fn only_versions_that_have_a_cache_are_told_to_leave_it() {
        let option = |major, minor| Version { major, minor }.without_its_cache();
        assert_eq!(
            [option(11, 8), option(12, 8), option(12, 9), option(13, 0)],
            [None, None, Some("--no-cache"), Some("--no-cache")]
        );
    }
}
