package PVE::Storage::Plugin;

# What of PVE's class of this name the plugin stands on, for tests on machines without PVE.

use strict;
use warnings;

our @SHARED_STORAGE = ('nfs');

# The first name of a disk that no image of the machine has.
sub find_free_diskname {
    my ($class, $storeid, $scfg, $vmid, $fmt, $add_fmt_suffix) = @_;
    my %taken = map { $_->{volid} =~ /(?:vm|base)-[0-9]+-disk-([0-9]+)\z/ ? ($1 => 1) : () }
        @{ $class->list_images($storeid, $scfg, $vmid) };
    for my $number (0 .. 1023) {
        return "vm-$vmid-disk-$number" if !$taken{$number};
    }
    die "machine $vmid has all disks that it can have\n";
}

1;
