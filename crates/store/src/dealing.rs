//! Which reactor of a node has which device.
//!
//! A device stays with its reactor for as long as the process lives. Where slower devices are cached on faster ones, they
//! go to reactors that have such a one: a read cache serves the devices of its own reactor.

use holdfast_base::MediaClass;

/// A device as the configuration has it.
pub trait Named: Clone + PartialEq {
    /// Whether both are the same device, whatever else is known of it.
    fn is(&self, other: &Self) -> bool;

    /// Whether both are in the same place, be they the same device or not.
    fn is_at(&self, other: &Self) -> bool;
}

/// The reactors of a node, and what each was dealt.
pub struct Dealing<D> {
    has_cache: bool,
    reactors: Vec<Vec<Dealt<D>>>,
}

struct Dealt<D> {
    device: D,
    class: Option<MediaClass>,
}

impl<D: Named> Dealing<D> {
    pub fn new(count: usize, has_cache: bool) -> Dealing<D> {
        assert!(count > 0, "a node has a reactor");
        Dealing { has_cache, reactors: (0..count).map(|_| Vec::new()).collect() }
    }

    /// The node has these devices: each reactor's share, in its order. Of new ones the class is asked.
    pub fn deal(&mut self, devices: &[D], class_of: impl Fn(&D) -> Option<MediaClass>) -> Vec<Vec<D>> {
        let mut new: Vec<Dealt<D>> = Vec::new();
        for device in devices {
            let known = self.reactors.iter_mut().flatten().find(|dealt| dealt.device.is(device));
            match known {
                Some(dealt) => dealt.device = device.clone(),
                None => new.push(Dealt { device: device.clone(), class: class_of(device) }),
            }
        }
        // One that has taken another's place, or was made anew there, is for the same reactor: it lets the former go first.
        new.retain(|dealt| {
            let mut former = self.reactors.iter_mut().flatten();
            let former = former.find(|known| known.device.is_at(&dealt.device) && !devices.contains(&known.device));
            former.map(|former| (former.device, former.class) = (dealt.device.clone(), dealt.class)).is_none()
        });
        // The fastest first: the others go where these are.
        new.sort_by_key(|dealt| std::cmp::Reverse(dealt.class));
        for dealt in new {
            let reactor = self.reactor_for(dealt.class);
            self.reactors[reactor].push(dealt);
        }
        let is_wanted = |dealt: &&Dealt<D>| devices.contains(&dealt.device);
        let share = |dealt: &Vec<Dealt<D>>| dealt.iter().filter(is_wanted).map(|dealt| dealt.device.clone()).collect();
        self.reactors.iter().map(share).collect()
    }

    /// Of those that it may go to the one with the fewest of its class, then with the fewest.
    fn reactor_for(&self, class: Option<MediaClass>) -> usize {
        let fastest = self.reactors.iter().flatten().filter_map(|dealt| dealt.class).max();
        let is_slow = self.has_cache && class.is_some() && class < fastest;
        let has_fast = |reactor: &Vec<Dealt<D>>| reactor.iter().any(|dealt| dealt.class == fastest);
        let candidates = (0..self.reactors.len()).filter(|number| !is_slow || has_fast(&self.reactors[*number]));
        let load = |number: &usize| {
            let dealt = &self.reactors[*number];
            (dealt.iter().filter(|dealt| dealt.class == class).count(), dealt.len())
        };
        candidates.min_by_key(load).expect("the fastest device is somewhere")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By its letters, and by its number where both have one.
    #[derive(Clone, PartialEq, Debug)]
    struct Device(&'static str, Option<u32>);

    impl Named for Device {
        fn is(&self, other: &Device) -> bool {
            match (self.1, other.1) {
                (Some(own), Some(other)) => own == other,
                _ => self.is_at(other),
            }
        }

        fn is_at(&self, other: &Device) -> bool {
            self.0 == other.0
        }
    }

    fn class_of(device: &Device) -> Option<MediaClass> {
        match device.0.chars().next() {
            Some('n') => Some(MediaClass::Nvme),
            Some('h') => Some(MediaClass::Hdd),
            _ => None,
        }
    }

    fn dealt(dealing: &mut Dealing<Device>, names: &[&'static str]) -> Vec<Vec<&'static str>> {
        let devices: Vec<Device> = names.iter().map(|name| Device(name, None)).collect();
        let shares = dealing.deal(&devices, class_of);
        shares.iter().map(|share| share.iter().map(|device| device.0).collect()).collect()
    }

    #[test]
    fn devices_are_spread_and_stay_where_they_are() {
        let mut dealing = Dealing::new(2, true);
        assert_eq!(dealt(&mut dealing, &["a", "b", "c"]), [vec!["a", "c"], vec!["b"]]);
        assert_eq!(dealt(&mut dealing, &["b", "c", "d"]), [vec!["c"], vec!["b", "d"]]);
        assert_eq!(dealt(&mut dealing, &["a", "d"]), [vec!["a"], vec!["d"]]);
        // One that has moved to another place is the same by its number.
        let here = |name| [Device(name, Some(5))];
        let before = dealing.deal(&here("x"), class_of).iter().position(|share| !share.is_empty());
        assert_eq!(before, Some(0));
        assert_eq!(dealing.deal(&here("y"), class_of), [here("y").to_vec(), Vec::new()]);
    }

    #[test]
    fn one_that_takes_anothers_place_goes_to_its_reactor() {
        let mut dealing = Dealing::new(3, false);
        let devices = |last| [Device("a", Some(1)), Device("b", Some(2)), Device("c", Some(last))];
        let dealt = |dealing: &mut Dealing<Device>, last| {
            let shares = dealing.deal(&devices(last), class_of);
            assert_eq!(shares, devices(last).map(|device| vec![device]));
        };
        dealt(&mut dealing, 3);
        // Formatted anew, or replaced.
        dealt(&mut dealing, 4);
        dealt(&mut dealing, 5);
        // One more comes to where as many are as before.
        let all: Vec<Device> = devices(5).into_iter().chain([Device("d", Some(6))]).collect();
        assert_eq!(dealing.deal(&all, class_of)[0].len(), 2);
    }

    #[test]
    fn slow_devices_go_where_a_fast_one_is_if_they_are_cached_on_it() {
        let all = ["h1", "h2", "n1", "h3"];
        assert_eq!(dealt(&mut Dealing::new(2, true), &all), [vec!["n1", "h1", "h2", "h3"], vec![]]);
        assert_eq!(dealt(&mut Dealing::new(2, false), &all), [vec!["n1", "h2"], vec!["h1", "h3"]]);
        let all = ["h1", "n1", "h2", "n2"];
        assert_eq!(dealt(&mut Dealing::new(2, true), &all), [vec!["n1", "h1"], vec!["n2", "h2"]]);
    }
}
