package Disks;

# What tests do to disks, by what the plugin tells QEMU.

use strict;
use warnings;

use Exporter qw(import);
use JSON::PP;
use Test::More;

our @EXPORT = qw(blockdev dies grid_dir reads says writes);

$ENV{PATH} = '/usr/local/bin:/usr/bin:/bin';
delete @ENV{qw(IFS CDPATH ENV BASH_ENV)};

# A grid's directory that the environment names.
sub grid_dir {
    my ($name) = @_;
    my ($dir) = ($ENV{$name} // '') =~ m{\A(/[A-Za-z0-9/._-]+)\z} or die "set $name to the directory of a grid\n";
    return $dir;
}

# What a program says on its standard output, and how it ended.
sub says {
    my (@command) = @_;
    my $pid = open(my $out, '-|') // die "fork: $!\n";
    if (!$pid) {
        open(STDERR, '>&', \*STDOUT);
        exec { $command[0] } @command or die "$command[0]: $!\n";
    }
    my $said = do { local $/; <$out> } // '';
    close($out);
    return ($said, $?);
}

# As qemu-server gives it to QEMU: below the driver of a raw disk.
sub blockdev {
    my ($options, $is_read_only) = @_;
    my %raw = (driver => 'raw', file => $options, $is_read_only ? ('read-only' => JSON::PP::true) : ());
    my ($text) = ('json:' . JSON::PP->new->canonical->encode(\%raw)) =~ /\A(.*)\z/s;
    return $text;
}

sub qemu_io {
    my ($disk, $is_read_only, @does) = @_;
    my @options = ($is_read_only ? '-r' : (), $disk =~ /\Ajson:/ ? () : ('-f', 'raw'), map { ('-c', $_) } @does);
    my ($said, $status) = says('qemu-io', @options, $disk);
    # It ends well, whatever it found.
    my $is_well = $status == 0 && $said !~ /Pattern verification failed|error|failed/i;
    diag("qemu-io @does: $said") if !$is_well;
    return $is_well;
}

# Fills a range with a byte.
sub writes {
    my ($disk, $byte, $from, $length, $name) = @_;
    return ok(qemu_io($disk, 0, "write -P $byte $from $length"), $name);
}

# A range is full of a byte.
sub reads {
    my ($disk, $byte, $from, $length, $name) = @_;
    return ok(qemu_io($disk, 1, "read -P $byte $from $length"), $name);
}

# It ends with a text of that kind, of one line, for people.
sub dies {
    my ($does, $like, $name) = @_;
    my $is_done = eval { $does->(); 1 };
    return fail("$name: it did not die") if $is_done;
    my $why = "$@";
    like($why, $like, $name);
    return unlike($why, qr/ at \S+ line [0-9]+|\n./, "$name, in one line for people");
}

# A client that stays connected, as QEMU does.
package Disks::Client;

use IPC::Open2 qw(open2);
use Test::More;

sub new {
    my ($class, $disk) = @_;
    my $pid = open2(my $said, my $does, 'qemu-io', '-f', 'raw', $disk);
    return bless { pid => $pid, said => $said, does => $does }, $class;
}

# One read or write, which has to succeed; `-P` says what is found or written.
sub does {
    my ($self, $what) = @_;
    print { $self->{does} } "$what\n";
    $self->{does}->flush();
    my $text = '';
    while (defined(my $line = readline($self->{said}))) {
        $text .= $line;
        last if $line =~ / ops; |failed/;
    }
    return ok($text =~ / ops; / && $text !~ /failed/i, $what) || diag($text);
}

sub ends {
    my ($self) = @_;
    close($self->{does});
    waitpid($self->{pid}, 0);
    return is($?, 0, 'it ends well');
}

1;
